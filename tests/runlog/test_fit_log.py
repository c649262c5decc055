"""The use of time in the log of one `fit`. The clock is the test's."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

from keras_distplug.core.events import Event, Window  # noqa: E402
from keras_distplug.core.ledger import Category  # noqa: E402
from keras_distplug.runlog import fit_log  # noqa: E402


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def wait(self, secs: float) -> None:
        self.now_s += secs

    def read(self) -> float:
        return self.now_s


class Windows:
    """The windows of steps, as far as the log needs them."""

    def __init__(self, clock: Clock) -> None:
        self.begin_step = self.end_step = clock.read

    def end_window(self) -> None:
        return None


class Fit:
    """A `fit` whose hooks take no time; every window has what `spent` says."""

    def __init__(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = clock
        self.log = fit_log.FitLog(Windows(clock), None)  # type: ignore[arg-type]
        self.log.is_open = True
        self.events: list[Window] = []
        monkeypatch.setattr(self.log, "_write", self._write)

    def _write(self, at: float, event: Event) -> None:
        if isinstance(event, Window):
            self.events.append(event)

    def step(self, secs: float = 1.0) -> None:
        self.log.begin_step()
        self.clock.wait(secs)
        self.log.end_step(1, 0.5)

    def window(self) -> Any:
        self.log.end_window()
        return self.events[-1].secs


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fit]:
    clock = Clock()
    monkeypatch.setattr(fit_log, "_has_begun", True)
    monkeypatch.setattr(fit_log, "_LEAST_SECS", 1e9)
    monkeypatch.setattr(fit_log, "_MOST_SECS", 1e9)
    named = SimpleNamespace(monotonic=clock.read, perf_counter=clock.read, time=clock.read)
    monkeypatch.setattr(fit_log, "time", named)
    running = Fit(clock, monkeypatch)
    yield running
    running.log.close()


def test_steps(fit: Fit) -> None:
    """The time up to the end of the first step is the start; later, steps and callbacks differ."""
    fit.clock.wait(2)
    fit.step(3)
    assert fit.window() == {"start_up": 5}
    for _ in range(4):
        fit.clock.wait(0.25)
        fit.step()
    assert fit.window() == {"step": 4, "other": 1}
    assert (fit.events[-1].steps, fit.events[-1].step) == (4, 5)


def test_saves(fit: Fit) -> None:
    """The time of a save is no other's, whether training was in a step or between two."""
    fit.step()
    fit.window()
    fit.step()
    fit.clock.wait(2)
    fit.log.spent(Category.SAVE, 1.5)
    fit.log.begin_step()
    fit.clock.wait(3)
    fit.log.spent(Category.SAVE, 2)
    fit.log.end_step(1, 0.5)
    assert fit.window() == {"step": 2, "other": 0.5, "save": 3.5}


def test_window_ends_in_a_step(fit: Fit) -> None:
    """An error within a step ends the window there."""
    fit.step()
    fit.window()
    fit.log.begin_step()
    fit.clock.wait(2)
    assert fit.window() == {"step": 2}
    fit.clock.wait(1)
    fit.log.end_step(1, 0.5)
    assert fit.window() == {"step": 1}


def test_validation_in_a_step(fit: Fit) -> None:
    """A validation that begins and ends within a step is not the step's."""
    fit.step()
    fit.window()
    fit.log.begin_step()
    fit.clock.wait(1)
    fit.log.switch(Category.EVALUATION)
    fit.clock.wait(5)
    fit.log.switch(Category.OTHER)
    fit.clock.wait(2)
    fit.log.end_step(1, 0.5)
    assert fit.window() == {"step": 1, "evaluation": 5, "other": 2}


def test_data_of_unknown_length(fit: Fit) -> None:
    """An epoch whose data has ended begins one more step. What follows is not that step."""
    for _ in range(2):
        fit.step()
        fit.log.begin_step()
        fit.clock.wait(1)
        fit.log.end_epoch(0, None)
        fit.clock.wait(3)
    fit.log.end_window()
    assert [each.secs for each in fit.events[1:]] == [{"step": 2, "other": 3}, {"other": 3}]


@pytest.mark.parametrize("fails", [False, True])
def test_validation(fit: Fit, fails: bool) -> None:
    """Validation is its own category, also if it has failed and training continues."""
    fit.step()
    fit.window()
    fit.step()
    fit.log.switch(Category.EVALUATION)
    fit.clock.wait(5)
    if not fails:
        fit.log.switch(Category.OTHER)
    fit.step()
    fit.clock.wait(1)
    assert fit.window() == {"step": 2, "evaluation": 5, "other": 1}
