"""Measurements of workers and their replicas over a window of steps."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class ReplicaReport:
    """Measurements of one replica over a window. Times are medians per step, other values means.

    Args:
        replica: The replica's number among all replicas.
        compute_s: The time from its data to its own gradients, in seconds.
        sync_s: The time from there to the sum of all replicas' gradients, in seconds: waiting for
            the others and for the reduction. None if unknown.
        samples: The number of samples in its part of the batch; None if not requested.
        loss: The mean loss of the replica's samples; None if not requested, or if the step does not
            use `compute_loss`.
        gradient_norm: The norm of the gradients of the replica's samples; None if not requested.
        fingerprints: The fingerprint of its part of every batch; empty if not requested.
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
    """Measurements of one worker over a window of steps.

    Args:
        worker: The worker's rank.
        where: The worker's name and machine.
        step: The number of updates at the end of the window.
        steps: The number of steps in the window.
        step_s: The median time of a whole step, in seconds.
        replicas: The reports of its replicas, by number.
        input_s: The mean time per step that it waited for its data, in seconds; None if unknown.
        memory_bytes: The resident memory of its process at the end of the window; None if unknown.
        network_s: The estimated time to send a step's gradients to the chief and back, in seconds;
            None for the chief, or if unknown.
        is_network_new: True if `network_s` was measured in this window.
        input_total_s: The total time that it waited for its data, in seconds, without the first
            step of a training and steps that were retraced; None if unknown.
        sync_total_s: The total time that its replicas waited for other replicas and for the sum of
            gradients, in seconds, without that first step: the smallest of its replicas' totals;
            None if unknown.
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
    """Returns the report from a result of `as_text`."""
    told: dict[str, Any] = json.loads(text)
    replicas = tuple(
        ReplicaReport(**{**each, "fingerprints": tuple(each["fingerprints"])})
        for each in told["replicas"]
    )
    return StepReport(**{**told, "replicas": replicas})


def merge_reports(reports: Sequence[StepReport]) -> StepReport:
    """Merges one worker's reports of consecutive windows into one, with means over all steps."""

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


def replicas_with_same_data(reports: Sequence[StepReport]) -> tuple[int, ...]:
    """Returns the replicas that had the same data as another replica in every step of a window."""
    by_data = defaultdict(list)
    for report in reports:
        for each in report.replicas:
            if each.fingerprints:
                by_data[each.fingerprints].append(each.replica)
    return tuple(sorted(r for replicas in by_data.values() if len(replicas) > 1 for r in replicas))
