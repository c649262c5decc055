"""A tracker that records its input, and fails or hangs on request."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from keras_distplug.trackers import Incident, Mark, Outcome, Point, TrackedRun


def increases(steps: Sequence[int]) -> bool:
    """Returns True if there are several steps, in strictly increasing order."""
    return len(steps) > 1 and all(a < b for a, b in itertools.pairwise(steps))


class Recorded:
    """Records what a tracker receives.

    Args:
        name: The tracker's name.
        knows: True if it knows its last step, as a server does.
    """

    def __init__(self, name: str = "recorded", *, knows: bool = False) -> None:
        self.name = name
        self.knows = knows
        self.runs: list[TrackedRun] = []
        self.points: list[Point] = []
        self.incidents: list[Incident] = []
        self.outcomes: list[Outcome] = []
        self.threads: set[str] = set()
        self.before: Callable[[Any], None] = lambda what: None  # may raise, or wait

    def open(self, run: TrackedRun) -> Mark | None:
        self._begin(run)
        self.runs.append(run)
        if self.knows:
            last = self.points[-1] if self.points else None
            return Mark() if last is None else Mark(last.step, last.is_epoch_end)
        return None

    def log(self, point: Point) -> None:
        self._begin(point)
        self.points.append(point)

    def alert(self, incident: Incident) -> None:
        self._begin(incident)
        self.incidents.append(incident)

    def close(self, outcome: Outcome) -> None:
        self._begin(outcome)
        self.outcomes.append(outcome)

    @property
    def steps(self) -> list[int]:
        return [point.step for point in self.points]

    def _begin(self, what: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.before(what)

    def steps_with(self, metric: str) -> list[int]:
        return [point.step for point in self.points if metric in point.metrics]
