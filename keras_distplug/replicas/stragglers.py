"""Who is slow, of those that take their steps together."""

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
_LEAST_SHARE = 0.1  # of a step, that a straggler takes longer than others


@dataclass(frozen=True)
class Straggler:
    """One that is slower than the others, window after window, or is so no more.

    Args:
        cause: What takes it longer: `"compute"`, from its data to its gradients; `"input"`, to
            have its data; or `"network"`, to bring a step's gradients to the chief and back.
        worker: The rank of its worker.
        where: That one's name and machine.
        replica: Its number among all replicas; None where it is the worker's.
        own_s: How long it takes, in a step.
        others_s: How long others take: the median of them; None if there are none to compare with,
            as for the network of the only worker beside the chief.
        past_s: How long it took itself before; None if it was never fast enough to know.
        is_over: Whether it is as fast as others again.
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
        """1 for one that is as fast as others, or as itself before where there are none; 0.5 for
        one that takes twice as long."""
        reference_s = self.past_s if self.others_s is None else self.others_s
        return 1.0 if reference_s is None or not self.own_s else reference_s / self.own_s

    def __str__(self) -> str:
        who = self.where if self.replica is None else f"replica {self.replica} ({self.where})"
        if self.is_over:
            return f"{who} takes no longer than others any more {_WHAT[self.cause]}"
        others = "" if self.others_s is None else f", others {_time(self.others_s)}"
        past = "" if self.past_s is None else f"; before, it took {_time(self.past_s)}"
        return (
            f"{who} takes {_time(self.own_s)} {_WHAT[self.cause]} in each step{others}; all wait "
            f"for it{past}"
        )


_WHAT: Mapping[Cause, str] = {
    "compute": "to compute its gradients",
    "input": "for its data",
    "network": "to bring its gradients to the chief and back",
}


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


class Judge:
    """Tells stragglers from those that are slow now and then.

    The score of each is the median of the others over its own, as in NVIDIA's Resiliency Extension
    (whose reference is the fastest one), and it has to be low in several windows in a row, so that
    slowness that wanders from one to the next is none. What it takes longer has to matter, too.

    Args:
        threshold: A score below is low.
        windows: So many in a row make a straggler, and end one.
    """

    def __init__(self, threshold: float, windows: int) -> None:
        self._threshold = threshold
        self._windows = windows
        self._in_a_row: dict[Unit, int] = defaultdict(int)  # slow; below 0: fast
        self._known: set[Unit] = set()
        self._past: dict[Unit, deque[float]] = defaultdict(lambda: deque(maxlen=_PAST))

    def hear(self, reports: Sequence[StepReport]) -> list[Straggler]:
        """Takes a window of all workers, and gives whom there is to tell of, by now."""
        step_s = statistics.median(each.step_s for each in reports)
        stale = {("network", each.worker) for each in reports if not each.is_network_new}
        told = []
        for unit, compared in _compared(reports):
            if unit in stale:
                continue  # one measurement counts once
            past = self._past[unit]
            found = replace(compared, past_s=statistics.median(past) if past else None)
            longer_s = (1 - found.score) * found.own_s
            is_slow = found.score < self._threshold and longer_s >= _LEAST_SHARE * step_s
            before = self._in_a_row[unit]
            in_a_row = max(before, 0) + 1 if is_slow else min(before, 0) - 1
            self._in_a_row[unit] = in_a_row
            if in_a_row == self._windows and unit not in self._known:
                self._known.add(unit)
                told.append(found)
            elif in_a_row == -self._windows and unit in self._known:
                self._known.remove(unit)
                told.append(replace(found, is_over=True))
            if not is_slow:
                past.append(found.own_s)
        return told


def _compared(reports: Sequence[StepReport]) -> Iterator[tuple[Unit, Straggler]]:
    """Each replica, and each worker's input and network, beside the median of the others."""
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
