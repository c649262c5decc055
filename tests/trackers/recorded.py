"""A tracker that remembers what it receives, and fails or hangs when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from keras_distplug.trackers import Incident, Outcome, Point, TrackedRun


class Recorded:
    """Args:
    name: As trackers have one.
    knows: Whether it knows its last step, as a server does.
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

    def open(self, run: TrackedRun) -> int | None:
        self._begin(run)
        self.runs.append(run)
        if self.knows:
            return self.points[-1].step if self.points else -1
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
