"""Finds stragglers among replicas that step in sync."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from keras_distplug.step.step_reports import StepReport

Cause = Literal["compute", "input", "network"]
Unit = tuple[Cause, int]

_PAST = 128  # windows
_LEAST_SHARE = 0.1  # of a step: the minimum by which a straggler exceeds the others


@dataclass(frozen=True)
class Straggler:
    """A replica or worker that is slower than the others for several windows, or has recovered.

    Args:
        cause: The part of a step that takes longer: `"compute"`, from its data to its gradients;
            `"input"`, waiting for its data; or `"network"`, sending a step's gradients to the chief
            and back.
        worker: The rank of its worker.
        where: The worker's name and machine.
        replica: The replica's number among all replicas; None if the cause concerns the worker.
        own_s: Its time per step, in seconds.
        others_s: The median time of the others, in seconds; None without others, as for the
            network of the only worker other than the chief.
        past_s: Its own median time before, in seconds; None if it has never been fast enough.
        is_over: True if it is as fast as the others again.
    """

    cause: Cause
    worker: int
    where: str
    replica: int | None
    own_s: float
    others_s: float | None
    past_s: float | None
    is_over: bool = False

    @property
    def score(self) -> float:
        """The others' time relative to its own: 1 if equally fast, 0.5 if it takes twice as long.

        Without others, it is compared with its own past.
        """
        reference_s = self.past_s if self.others_s is None else self.others_s
        return 1.0 if reference_s is None or not self.own_s else reference_s / self.own_s

    def __str__(self) -> str:
        who = self.where if self.replica is None else f"replica {self.replica} ({self.where})"
        if self.is_over:
            return f"{who} no longer takes longer than the others {_ACTIVITY[self.cause]}"
        others = "" if self.others_s is None else f", others take {_time(self.others_s)}"
        past = "" if self.past_s is None else f" (it used to take {_time(self.past_s)})"
        return (
            f"{who} takes {_time(self.own_s)} per step {_ACTIVITY[self.cause]}{others}; all "
            f"workers wait for it{past}"
        )


_ACTIVITY: Mapping[Cause, str] = {
    "compute": "to compute its gradients",
    "input": "to get its data",
    "network": "to send its gradients to the chief and back",
}


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


class Judge:
    """Distinguishes stragglers from replicas that are only occasionally slow.

    The score is the median of the others' times divided by the replica's own, as in NVIDIA's
    Resiliency Extension (which uses the fastest one as the reference). It must be low in several
    consecutive windows, so that slowness that moves from replica to replica does not count. The
    time lost must also be a considerable part of the step.

    Args:
        threshold: The score below which a replica is slow.
        windows: The number of consecutive windows after which a straggler is reported, or has
            recovered.
    """

    def __init__(self, threshold: float, windows: int) -> None:
        self._threshold = threshold
        self._windows = windows
        self._streaks: dict[Unit, int] = defaultdict(int)  # slow; below 0: fast
        self._reported: set[Unit] = set()
        self._past: dict[Unit, deque[float]] = defaultdict(lambda: deque(maxlen=_PAST))

    def add(self, reports: Sequence[StepReport]) -> list[Straggler]:
        """Adds one window of all workers; returns new stragglers and those that have recovered."""
        step_s = statistics.median(each.step_s for each in reports)
        stale = {("network", each.worker) for each in reports if not each.is_network_new}
        news = []
        for unit, compared in _compared(reports):
            if unit in stale:
                continue  # one measurement counts once
            past = self._past[unit]
            found = replace(compared, past_s=statistics.median(past) if past else None)
            longer_s = (1 - found.score) * found.own_s
            is_slow = found.score < self._threshold and longer_s >= _LEAST_SHARE * step_s
            before = self._streaks[unit]
            streak = max(before, 0) + 1 if is_slow else min(before, 0) - 1
            self._streaks[unit] = streak
            if streak == self._windows and unit not in self._reported:
                self._reported.add(unit)
                news.append(found)
            elif streak == -self._windows and unit in self._reported:
                self._reported.remove(unit)
                news.append(replace(found, is_over=True))
            if not is_slow:
                past.append(found.own_s)
        return news


def _compared(reports: Sequence[StepReport]) -> Iterator[tuple[Unit, Straggler]]:
    """Yields every replica, and every worker's input and network, with the median of the others."""
    taken: dict[Cause, list[tuple[StepReport, int | None, float | None]]] = {
        "compute": [
            (each, own.replica, own.compute_s) for each in reports for own in each.replicas
        ],
        "input": [(each, None, each.input_s) for each in reports],
        "network": [(each, None, each.network_s) for each in reports],
    }
    for cause, each in taken.items():
        known = [(report, number, s) for report, number, s in each if s is not None]
        for place, (report, number, own_s) in enumerate(known):
            others = [s for _, _, s in known[:place] + known[place + 1 :]]
            if others or cause == "network":
                others_s = statistics.median(others) if others else None
                unit = report.worker if number is None else number
                found = Straggler(cause, report.worker, report.where, number, own_s, others_s, None)
                yield (cause, unit), found
