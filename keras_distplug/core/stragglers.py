"""Who is slow, of those that take their steps together."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Cause = Literal["compute", "input"]
Unit = tuple[Cause, int]

_PAST = 128  # windows


@dataclass(frozen=True)
class Pace:
    """How fast a worker was in a window of steps.

    Args:
        worker: Its rank.
        where: Its name, and its machine.
        step_s: A whole step.
        compute_s: For each of its replicas, by number, from its data to its gradients.
        input_s: How long it waited for its own data in a step; None if that is not known.
    """

    worker: int
    where: str
    step_s: float
    compute_s: Mapping[int, float]
    input_s: float | None = None


@dataclass(frozen=True)
class Straggler:
    """One that is slower than the others, window after window, or is so no more.

    Args:
        cause: What takes it longer: `"compute"`, from its data to its gradients, or `"input"`, to
            have its data.
        worker: The rank of its worker.
        where: That one's name and machine.
        replica: Its number among all replicas; None where the input is slow, which is a worker's.
        own_s: How long it takes, in a step.
        others_s: How long others take: the median of them.
        past_s: How long it took itself before; None if it was never fast enough to know.
        is_over: Whether it is as fast as others again.
    """

    cause: Cause
    worker: int
    where: str
    replica: int | None
    own_s: float
    others_s: float
    past_s: float | None
    is_over: bool = False

    @property
    def score(self) -> float:
        """1 for one that is as fast as others, 0.5 for one that takes twice as long."""
        return self.others_s / self.own_s if self.own_s else 1.0

    def __str__(self) -> str:
        who = self.where if self.replica is None else f"replica {self.replica} ({self.where})"
        what = "for its data" if self.cause == "input" else "to compute its gradients"
        if self.is_over:
            return f"{who} takes no longer than others any more {what}"
        past = "" if self.past_s is None else f"; before, it took {_time(self.past_s)}"
        return (
            f"{who} takes {_time(self.own_s)} {what} in each step, others {_time(self.others_s)}, "
            f"and wait for it{past}"
        )


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
        least_share: Of a step, that one has to take longer than others.
    """

    def __init__(self, threshold: float, windows: int, least_share: float = 0.1) -> None:
        self._threshold = threshold
        self._windows = windows
        self._least_share = least_share
        self._in_a_row: dict[Unit, int] = defaultdict(int)  # slow; below 0: fast
        self._known: set[Unit] = set()
        self._past: dict[Unit, deque[float]] = defaultdict(lambda: deque(maxlen=_PAST))

    def hear(self, paces: Sequence[Pace]) -> list[Straggler]:
        """Takes a window of all workers, and gives whom there is to tell of, by now."""
        step_s = statistics.median(each.step_s for each in paces)
        told = []
        for unit, found in _compared(paces):
            longer_s = found.own_s - found.others_s
            is_slow = found.score < self._threshold and longer_s >= self._least_share * step_s
            self._count(unit, is_slow)
            past = self._past[unit]
            if self._in_a_row[unit] == self._windows and unit not in self._known:
                self._known.add(unit)
                told.append(replace(found, past_s=statistics.median(past) if past else None))
            elif self._in_a_row[unit] == -self._windows and unit in self._known:
                self._known.remove(unit)
                told.append(replace(found, is_over=True))
            if not is_slow:
                past.append(found.own_s)
        return told

    def _count(self, unit: Unit, is_slow: bool) -> None:
        before = self._in_a_row[unit]
        self._in_a_row[unit] = max(before, 0) + 1 if is_slow else min(before, 0) - 1


def _compared(paces: Sequence[Pace]) -> Iterator[tuple[Unit, Straggler]]:
    """Each replica and each worker's input, beside the median of the others."""
    replicas = [(each, number, s) for each in paces for number, s in each.compute_s.items()]
    for pace, number, own_s in replicas if len(replicas) > 1 else ():
        others_s = statistics.median(s for _, other, s in replicas if other != number)
        yield (
            ("compute", number),
            Straggler("compute", pace.worker, pace.where, number, own_s, others_s, None),
        )
    inputs = [(each, each.input_s) for each in paces if each.input_s is not None]
    for pace, own_s in inputs if len(inputs) > 1 else ():
        others_s = statistics.median(s for other, s in inputs if other is not pace)
        yield (
            ("input", pace.worker),
            Straggler("input", pace.worker, pace.where, None, own_s, others_s, None),
        )
