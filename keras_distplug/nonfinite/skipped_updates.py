"""Updates that were not applied, and which replicas they came from."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicaValues:
    """The values of one replica, without the others, in a step whose update was not applied.

    Args:
        replica: Its number among all replicas.
        where: Its worker, and the worker's machine.
        loss: Its loss; None if the step does not report one.
        norm: The norm of its gradients.
        variables: The paths of the variables whose gradients are not finite, in the model's order.
        origin: The first non-finite value when its batch is recomputed: an array of the batch, a
            variable, the output of a layer, the loss, or a gradient. Defaults to `None`: not known.
        is_transient: True if all values are finite when its batch is recomputed. Defaults to
            `False`.
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
            what.append(f"non-finite gradients of {self.variables[0]}{others}")
        elif math.isfinite(self.norm):
            what.append(f"gradients with a norm of {self.norm:.4g}")
        told = f"replica {self.replica} ({self.where}) has {' and '.join(what)}"
        if self.is_transient:
            return f"{told}; when recomputed, all values are finite"
        return told if self.origin is None else f"{told}; NaN or Inf first appears in {self.origin}"


@dataclass(frozen=True)
class SkippedUpdate:
    """An update that was not applied.

    Args:
        epoch: The index of the epoch, from 0 as in Keras.
        batch: The index of the batch in the epoch, from 0; None if it belongs to an execution of
            several steps and the step is not known.
        culprits: The replicas that caused it. Empty if only the sum of all gradients is not finite;
            all replicas if all are affected.
        replicas: The number of replicas; 0 under ParameterServerStrategy, where workers do not
            report them.
        score: The robust z-score of the gradients' norm among previous ones; None if it is not
            finite or was not checked.
        loss_score: The same for the loss of all replicas.
        in_a_row: The number of consecutive updates that were not applied, including this one.
    """

    epoch: int
    batch: int | None
    culprits: tuple[ReplicaValues, ...]
    replicas: int
    score: float | None
    loss_score: float | None
    in_a_row: int

    def __str__(self) -> str:
        batch = "a batch" if self.batch is None else f"batch {self.batch + 1}"
        scores = {"the norm of the gradients": self.score, "the loss": self.loss_score}
        told = [
            f"the robust z-score of {name} is {score:.1f}"
            for name, score in scores.items()
            if score is not None
        ]
        what = f"{', '.join(told)}; " if told else ""
        if not self.replicas:
            why = "a worker has a non-finite loss or non-finite gradients"
        elif not self.culprits:
            why = "the sum of all replicas' gradients is not finite, but the gradients are"
        elif len(self.culprits) == self.replicas > 1:
            why = f"all {self.replicas} replicas are affected; {self.culprits[0]}"
        else:
            why = "; ".join(str(each) for each in self.culprits)
        return f"epoch {self.epoch + 1}, {batch}: {what}{why}"


def find_culprits(replicas: Sequence[ReplicaValues]) -> tuple[ReplicaValues, ...]:
    """Returns the replicas that caused a step's fault.

    If all gradients are finite, these are the replicas whose gradient norm is more than three times
    the median of the others, or all replicas without such a difference.
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
