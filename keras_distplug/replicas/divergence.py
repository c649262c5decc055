"""Replicas that should have the same weights, and have not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Divergence:
    """Replicas whose values are not those of the others.

    Args:
        step: How many updates there were by then.
        variable: The first one that differs, in the model's order.
        variables: How many differ.
        replicas: The numbers of those whose values of that one are not those of most; all, if there
            are no most.
        where: The workers of these, with their machines.
    """

    step: int
    variable: str
    variables: int
    replicas: tuple[int, ...]
    where: tuple[str, ...]

    def __str__(self) -> str:
        which = "replica" if len(self.replicas) == 1 else "replicas"
        numbers = ", ".join(map(str, self.replicas))
        more = f", and {self.variables - 1} more," if self.variables > 1 else ""
        return (
            f"at step {self.step}, `{self.variable}`{more} of {which} {numbers} "
            f"({', '.join(self.where)}) differs from that of others: they train different models "
            "from here on. Go on from a checkpoint from before it"
        )


def divergence(
    step: int, checksums: Mapping[int, Mapping[str, str]], where: Mapping[int, str]
) -> Divergence | None:
    """Compares replicas; None if they are the same.

    Args:
        step: Of all of them.
        checksums: Of each replica, by its number, of each variable, in the same order.
        where: Each one's worker.
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
