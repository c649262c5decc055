"""Updates that were not applied, and which replicas they came from."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class OfReplica:
    """What one replica had, by itself, in a step whose update was not applied.

    Args:
        replica: Its number among all replicas.
        where: Its worker, and that one's machine.
        loss: Its loss; None if the step does not tell.
        norm: Of its gradients.
        variables: Paths of those whose gradients are not finite, in the model's order.
        origin: What is not finite first when its batch is computed once more, by itself: an array
            of the batch, a variable, what a layer makes of finite inputs, the loss, or a gradient.
        is_transient: Whether all is finite then.
    """

    replica: int
    where: str
    loss: float | None
    norm: float
    variables: tuple[str, ...]
    origin: str | None = None
    is_transient: bool = False

    @property
    def is_finite(self) -> bool:
        return not self.variables and (self.loss is None or math.isfinite(self.loss))

    def __str__(self) -> str:
        what = []
        if self.loss is not None and not (math.isfinite(self.loss) and self.variables):
            what.append(f"a loss of {self.loss:.4g}")
        if self.variables:
            others = f" and {len(self.variables) - 1} more" if len(self.variables) > 1 else ""
            what.append(f"gradients of {self.variables[0]}{others} that are not finite")
        elif math.isfinite(self.norm):
            what.append(f"gradients with a norm of {self.norm:.4g}")
        told = f"replica {self.replica} ({self.where}) has {' and '.join(what)}"
        if self.is_transient:
            return f"{told}; computed once more, by itself, all is finite"
        return told if self.origin is None else f"{told}; it begins with {self.origin}"


@dataclass(frozen=True)
class LeftOut:
    """An update that was not applied.

    Args:
        epoch: Counted from 0, as Keras does.
        batch: In the epoch, counted from 0; None if it is one of an execution of several steps and
            it is not known which.
        culprits: The replicas it came from. None of them if only the sum of all is not finite; all
            of them if they met the same.
        replicas: How many there are; 0 where workers train each for itself, and do not tell.
        score: How far the norm of the gradients is above those before, where it is finite and was
            looked at.
        loss_score: The same of the loss, of all replicas together.
        in_a_row: How many updates in a row were not applied, with this one.
    """

    epoch: int
    batch: int | None
    culprits: tuple[OfReplica, ...]
    replicas: int
    score: float | None
    loss_score: float | None
    in_a_row: int

    def __str__(self) -> str:
        batch = "a batch" if self.batch is None else f"batch {self.batch + 1}"
        scores = {"the norm of the gradients": self.score, "the loss": self.loss_score}
        told = [
            f"{name} is {score:.1f} spreads above that of others"
            for name, score in scores.items()
            if score is not None
        ]
        what = f"{', '.join(told)}; " if told else ""
        if not self.replicas:
            why = "a worker has a loss or gradients that are not finite"
        elif not self.culprits:
            why = "the gradients of all replicas together are not finite, those of each are"
        elif len(self.culprits) == self.replicas > 1:
            why = f"each of the {self.replicas} replicas met it; {self.culprits[0]}"
        else:
            why = "; ".join(str(each) for each in self.culprits)
        return f"epoch {self.epoch + 1}, {batch}: {what}{why}"


def culprits_of(replicas: Sequence[OfReplica]) -> tuple[OfReplica, ...]:
    """Those of a step's replicas that a fault came from.

    Of gradients that are all finite, those whose norm is three times that of most others: the
    median of them. All, if there is no such difference.
    """
    if not all(each.is_finite for each in replicas):
        return tuple(each for each in replicas if not each.is_finite)
    if len(replicas) == 1:
        return tuple(replicas)
    large = [
        each
        for each in replicas
        if each.norm > 3 * statistics.median(o.norm for o in replicas if o is not each)
    ]
    return tuple(large or replicas)
