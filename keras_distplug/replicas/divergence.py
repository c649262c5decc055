"""Detects replicas whose weights have diverged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Divergence:
    """Replicas whose variables differ from those of the other replicas.

    Args:
        step: The number of updates at the time of the comparison.
        variable: The first variable that differs, in the model's order.
        variables: The number of variables that differ.
        replicas: The numbers of the replicas whose value of `variable` differs from the majority's;
            all replicas without a majority.
        where: Their workers, with machines.
    """

    step: int
    variable: str
    variables: int
    replicas: tuple[int, ...]
    where: tuple[str, ...]

    def __str__(self) -> str:
        which = "replica" if len(self.replicas) == 1 else "replicas"
        numbers = ", ".join(map(str, self.replicas))
        more = f" (and {self.variables - 1} more)" if self.variables > 1 else ""
        return (
            f"at step {self.step}, the values of `{self.variable}`{more} on {which} {numbers} "
            f"({', '.join(self.where)}) differ from those of other replicas: they now train "
            "different models. Resume from a checkpoint saved before this step"
        )


def divergence(
    step: int, checksums: Mapping[int, Mapping[str, str]], where: Mapping[int, str]
) -> Divergence | None:
    """Compares replicas; returns None if they are identical.

    Args:
        step: The step that all replicas have reached.
        checksums: The checksums of all variables, in the same order for every replica, by replica
            number.
        where: The worker of every replica.
    """
    every = list(checksums.values())
    different = [name for name in every[0] if len({each.get(name) for each in every}) > 1]
    if not different:
        return None
    values = {replica: each.get(different[0]) for replica, each in checksums.items()}
    (most, count), *others = Counter(values.values()).most_common()
    is_most = count > others[0][1]
    odd = tuple(replica for replica, each in values.items() if not is_most or each != most)
    places = tuple(dict.fromkeys(where[replica] for replica in odd))
    return Divergence(step, different[0], len(different), odd, places)
