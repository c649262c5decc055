"""What workers and their replicas had in a window of steps."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class ReplicaReport:
    """What one replica had in each step of a window. Times are medians, the others are means.

    Args:
        replica: Its number among all replicas.
        compute_s: From its data to its own gradients.
        sync_s: From there to the sum of all replicas' gradients, so that it is the wait for the
            others, and for the sum; None if that is not known.
        samples: Of its part of the batch; None if that was not asked for, as what follows.
        loss: Of its own samples; None, too, if the step does not take it from `compute_loss`.
        gradient_norm: Of what its own samples alone would give.
        fingerprints: Of its part of the batch, of each step.
    """

    replica: int
    compute_s: float
    sync_s: float | None = None
    samples: float | None = None
    loss: float | None = None
    gradient_norm: float | None = None
    fingerprints: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepReport:
    """What a worker had in a window of steps.

    Args:
        worker: Its rank.
        where: Its name, and its machine.
        step: How many updates there were at the end of it.
        steps: How many of them it has.
        step_s: A whole step, the median.
        replicas: Its own ones, by number.
        input_s: How long it waited for its own data in a step, the mean; None if that is not known.
        memory_bytes: What its process has in memory at the end of it; None if that is not known.
        network_s: How long it would take to bring a step's gradients to the chief and back; None
            for the chief, or if that is not known.
        is_network_new: Whether that was measured in this window.
        input_total_s: How long it waited for its own data in all steps but the first one of a
            training, and those that were traced anew; None if that is not known.
        sync_total_s: How long all of its replicas waited for others, and for the sum of gradients,
            in all steps but that first one: the least of them; None if that is not known.
    """

    worker: int
    where: str
    step: int
    steps: int
    step_s: float
    replicas: tuple[ReplicaReport, ...]
    input_s: float | None = None
    memory_bytes: int | None = None
    network_s: float | None = None
    is_network_new: bool = True
    input_total_s: float | None = None
    sync_total_s: float | None = None


def as_text(report: StepReport) -> str:
    return json.dumps(asdict(report))


def from_text(text: str) -> StepReport:
    """The inverse of `as_text`."""
    told: dict[str, Any] = json.loads(text)
    replicas = tuple(
        ReplicaReport(**{**each, "fingerprints": tuple(each["fingerprints"])})
        for each in told["replicas"]
    )
    return StepReport(**{**told, "replicas": replicas})


def merged(reports: Sequence[StepReport]) -> StepReport:
    """Those of one worker, one window after the other, as one: means over their steps."""

    def mean(values: Iterable[tuple[int, float | None]]) -> float | None:
        known = [(steps, value) for steps, value in values if value is not None]
        total = sum(steps for steps, _ in known)
        return sum(steps * value for steps, value in known) / total if known else None

    of_replicas = defaultdict(list)
    for report in reports:
        for each in report.replicas:
            of_replicas[each.replica].append((report.steps, each))
    replicas = tuple(
        ReplicaReport(
            replica,
            mean((steps, each.compute_s) for steps, each in parts) or 0.0,
            mean((steps, each.sync_s) for steps, each in parts),
            mean((steps, each.samples) for steps, each in parts),
            mean((steps, each.loss) for steps, each in parts),
            mean((steps, each.gradient_norm) for steps, each in parts),
        )
        for replica, parts in of_replicas.items()
    )
    return replace(
        reports[-1],
        steps=sum(each.steps for each in reports),
        step_s=mean((each.steps, each.step_s) for each in reports) or 0.0,
        replicas=replicas,
        input_s=mean((each.steps, each.input_s) for each in reports),
        input_total_s=_sum(each.input_total_s for each in reports),
        sync_total_s=_sum(each.sync_total_s for each in reports),
    )


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def with_same_data(reports: Sequence[StepReport]) -> tuple[int, ...]:
    """The replicas of a window whose data were those of another one in each of its steps."""
    by_data = defaultdict(list)
    for report in reports:
        for each in report.replicas:
            if each.fingerprints:
                by_data[each.fingerprints].append(each.replica)
    return tuple(sorted(r for replicas in by_data.values() if len(replicas) > 1 for r in replicas))
