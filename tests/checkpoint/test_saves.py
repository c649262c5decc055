"""Tests when a training saves, and how failed saves are handled."""

from __future__ import annotations

import os
import pty
import threading
import time
import warnings
from collections.abc import Callable

import pytest

from keras_distplug.checkpoint import progress_line
from keras_distplug.checkpoint.cadence import Cadence, EveryBatches, EveryEpoch, Pace
from keras_distplug.checkpoint.saver import Saver
from keras_distplug.checkpoint.saves import Saves
from keras_distplug.core.errors import AgreementError, SaveError
from keras_distplug.core.state import Cursor, TrainState
from keras_distplug.storage.meter import Meter


class Alone:
    """One worker that agrees with itself."""

    def broadcast(self, topic: str, value: str | None) -> str:
        assert value is not None
        return value

    def barrier(self, topic: str) -> None:
        return


class Follower:
    """A worker that receives the chief's messages."""

    def __init__(self, *words: str) -> None:
        self.words = list(words)

    def broadcast(self, topic: str, value: str | None) -> str:
        assert value is None
        if not self.words:
            raise AgreementError(topic)
        return self.words.pop(0)

    def barrier(self, topic: str) -> None:
        return


class Writer:
    """Records the states to save, once it may; fails on request."""

    def __init__(self) -> None:
        self.saved: list[tuple[int, str]] = []
        self.meter = Meter()
        self.failing = False
        self.may_write = threading.Event()
        self.may_write.set()

    def save(self, state: TrainState, attempt: str) -> None:
        assert self.may_write.wait(30)
        self.saved.append((state.cursor.step, attempt))
        if self.failing:
            raise SaveError(f"step {state.cursor.step}: the disk is full")

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.saved]


def saves(
    writer: Writer,
    cadence: Cadence = EveryBatches(1),  # noqa: B008 (frozen)
    agreement: object = None,
    *,
    is_chief: bool = True,
    max_failed_saves: int = 3,
    wait_if_busy: bool = True,
) -> Saves:
    return Saves(
        writer,  # type: ignore[arg-type]
        agreement or Alone(),  # type: ignore[arg-type]
        Pace(cadence, 0, 0.0, wait_if_busy=wait_if_busy),
        is_chief=is_chief,
        max_failed_saves=max_failed_saves,
        on_saved=lambda step: None,
    )


def at(step: int) -> Callable[[], TrainState]:
    return lambda: TrainState(Cursor(0, 0, step), {})


def end_step(running: Saves, step: int, state: Callable[[], TrainState], *, is_sound: bool) -> None:
    if running.stepped(step, 0.1):
        running.look(step, state, is_sound=is_sound)


def train(running: Saves, steps: range) -> None:
    for step in steps:
        end_step(running, step, at(step), is_sound=True)


def test_attempts_differ() -> None:
    """Every save has a different name, and those of another training have others."""
    first, second = Writer(), Writer()
    for writer in (first, second):
        running = saves(writer, EveryBatches(2))
        train(running, range(1, 7))
        running.finish()
        assert writer.steps == [2, 4, 6]
    attempts = [attempt for _, attempt in first.saved + second.saved]
    assert len(set(attempts)) == 6


def test_state_is_captured_immediately() -> None:
    """The state is captured when the save is due, however late it is written."""
    writer, now = Writer(), [1]
    writer.may_write.clear()
    running = saves(writer)
    end_step(running, 1, lambda: TrainState(Cursor(0, 0, now[0]), {}), is_sound=True)
    now[0] = 2
    writer.may_write.set()
    running.finish()
    assert writer.steps == [1]


def test_unsound_state() -> None:
    """A state with a non-finite loss is not saved; the next sound one is."""
    writer = Writer()
    running = saves(writer, EveryBatches(3))
    for step in range(1, 8):
        end_step(running, step, at(step), is_sound=step not in (3, 4))
    running.finish()
    assert writer.steps == [5]


def test_failures_are_reported() -> None:
    """A failed save causes a warning after the next batch, and training continues."""
    writer = Writer()
    running = saves(writer, EveryBatches(2))
    writer.failing = True
    train(running, range(1, 3))
    running._saver.wait()
    writer.failing = False
    with pytest.warns(UserWarning, match=r"consecutive failures: 1\b.*step 2: the disk is full"):
        end_step(running, 3, at(3), is_sound=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(running, range(4, 7))
        running.finish()
    assert writer.steps == [2, 4, 6]


def test_too_many_failures() -> None:
    """Too many consecutive failures end training when the next one is due; a success resets the
    count."""
    writer = Writer()
    running = saves(writer, max_failed_saves=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in (1, 2, 3):
            writer.failing = step != 2
            end_step(running, step, at(step), is_sound=True)
            running._saver.wait()
        writer.failing = True
        end_step(running, 4, at(4), is_sound=True)
        running._saver.wait()
        with pytest.raises(SaveError, match=r"failures: 2.*step 4: the disk is full"):
            end_step(running, 5, at(5), is_sound=True)
    assert writer.steps == [1, 2, 3, 4]


def test_storage_that_hangs() -> None:
    """A save that hangs is reported while training continues, and ends it when saves are due too
    often."""
    writer = Writer()
    running = saves(writer, EveryBatches(2), max_failed_saves=2, wait_if_busy=False)
    running._saver = Saver(timeout_s=0.01)
    writer.may_write.clear()
    with (
        pytest.warns(UserWarning, match=r"failures: \d.*step 2 was still being written after"),
        pytest.raises(SaveError, match="step 2 was still being written after"),
    ):
        train(running, range(1, 10**9))
    writer.may_write.set()
    running._saver.wait(60.0)  # its content is needed by the storage
    assert writer.steps == [2]


def test_failed_last_save() -> None:
    """Training does not end as if nothing were wrong if its last save has failed."""
    writer = Writer()
    running = saves(writer, EveryEpoch())
    writer.failing = True
    running.save(at(9))
    with (
        pytest.warns(UserWarning, match="disk is full"),
        pytest.raises(SaveError, match="disk is full"),
    ):
        running.finish()


def test_follower() -> None:
    """A worker other than the chief follows the chief's decisions, and raises its errors."""
    writer = Writer()
    words = [
        "attempts",
        '{"failed": null, "fenced": null, "plan": {"save": true, "next_look": 5}}',
        '{"failed": null, "fenced": null, "plan": {"save": false, "next_look": 6}}',
        '{"failed": "the disk of worker 0 is full", "fenced": null, '
        '"plan": {"save": true, "next_look": 7}}',
    ]
    running = saves(writer, EveryBatches(3), Follower(*words), is_chief=False)
    train(running, range(1, 6))
    with pytest.raises(SaveError, match="the disk of worker 0 is full"):
        train(running, range(6, 7))
    running._saver.wait()
    assert writer.saved == [(3, "attempts-1")]


def wait_until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def finish_slowly(writer: Writer, running: Saves, until: Callable[[], bool]) -> None:
    """Ends a training whose last save finishes later."""
    writer.may_write.clear()
    writer.meter.begin(40 * 2**20)
    writer.meter.add(10 * 2**20)
    running.save(at(9))
    released = threading.Thread(target=lambda: (wait_until(until), writer.may_write.set()))
    released.start()
    running.finish()
    released.join()


@pytest.mark.parametrize("is_chief", [True, False])
def test_long_save_is_shown(
    is_chief: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If training waits for a save, the chief shows its progress; in a log, only once."""
    monkeypatch.setattr(progress_line, "AFTER_SECS", 0.0)
    writer, waits = Writer(), threading.Event()
    running = saves(writer, agreement=None if is_chief else Follower("a"), is_chief=is_chief)
    monkeypatch.setattr(running._saver, "wait", noted(running._saver.wait, waits))
    finish_slowly(writer, running, lambda: bool(caplog.messages) if is_chief else waits.is_set())
    said = [line for line in caplog.messages if "writing" in line]
    expected = "writing checkpoint of step 9: 10 of 40 MB after 0 s"
    assert said == ([expected] if is_chief else [])


def noted(action: Callable[..., None], event: threading.Event) -> Callable[..., None]:
    def run(*args: object) -> None:
        event.set()
        action(*args)

    return run


def test_short_save_is_not_shown(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that finishes before the line is due leaves no line, and no thread."""
    monkeypatch.setattr(progress_line, "AFTER_SECS", 1e6)
    writer = Writer()
    running, waits = saves(writer), threading.Event()
    monkeypatch.setattr(running._saver, "wait", noted(running._saver.wait, waits))
    finish_slowly(writer, running, waits.is_set)
    assert caplog.messages == []
    assert not [each for each in threading.enumerate() if "progress" in each.name]


def test_bar_on_a_terminal(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal, a progress bar moves, and the log has no line."""
    monkeypatch.setattr(progress_line, "AFTER_SECS", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    ours, theirs = pty.openpty()
    shown, writer = bytearray(), Writer()

    def read() -> None:
        while b"10 of 40 MB" not in shown:
            shown.extend(os.read(ours, 4096))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with open(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        finish_slowly(writer, saves(writer), lambda: not reader.is_alive())
        monkeypatch.undo()
    os.close(ours)
    assert "writing checkpoint of step 9" in shown.decode()
    assert caplog.messages == []
