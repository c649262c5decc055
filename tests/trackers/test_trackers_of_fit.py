"""Trackers in a real `fit`: they change nothing, and a restart continues their run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
from support import small  # noqa: E402
from trackers.recorded import Recorded, increases  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.core import reporting  # noqa: E402
from keras_distplug.trackers import Outcome, outbox  # noqa: E402

EPOCHS = 3


@pytest.fixture(autouse=True)
def every_batch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Logs a window for every batch."""
    monkeypatch.setattr("keras_distplug.runlog.fit_log._LEAST_SECS", 0.0)
    monkeypatch.setattr("keras_distplug.runlog.fit_log._SHARE", 0.0)
    yield
    for listener in reporting.listeners():
        reporting.listen_no_more(listener)


def fit(callbacks: list[keras.callbacks.Callback]) -> list[bytes]:
    model = small.model()
    model.fit(
        *(small.X, small.Y),
        batch_size=8,
        epochs=EPOCHS,
        verbose=0,
        validation_data=(small.X, small.Y),
        callbacks=callbacks,
    )
    return small.state(model)


def ours(folder: Path, tracker: Recorded) -> list[keras.callbacks.Callback]:
    return [*kd.defaults(folder, save_freq=3), kd.RunLog(trackers=[tracker])]


def test_interrupted(tmp_path: Path) -> None:
    """After an interruption between checkpoints, the weights are those of plain Keras. The tracker
    has every step once, the epochs' logs, and the restart as an incident."""
    plain = fit([])
    tracker = Recorded(knows=True)
    with pytest.raises(small.Interrupted):
        fit([*ours(tmp_path, tracker), small.Stop(1, 3)])
    small.start_process()
    assert fit(ours(tmp_path, tracker)) == plain
    assert increases(tracker.steps_with("distplug/steps_per_second"))
    assert tracker.steps == sorted(tracker.steps)
    assert tracker.steps[-1] == EPOCHS * small.BATCHES
    assert tracker.steps_with("val_loss") == [4, 8, 12]
    assert len({run.key for run in tracker.runs}) == 1
    assert tracker.outcomes == [Outcome.INTERRUPTED, Outcome.FINISHED]
    assert [each.kind for each in tracker.incidents] == ["resumed"]
    metrics = {name for point in tracker.points for name in point.metrics}
    assert {"mae", "distplug/goodput", "distplug/checkpoint_age_secs"} <= metrics


@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_broken_tracker(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker that raises in every call, or never returns, changes no bit and only costs the
    limited wait at the end."""
    monkeypatch.setattr(outbox, "_LAST_SECS", 0.5)
    plain = fit([])
    tracker, release = Recorded(), threading.Event()

    def fail(what: Any) -> None:
        if how == "hangs":
            release.wait(60)
        raise ConnectionError("down")

    tracker.before = fail
    started_s = time.monotonic()
    assert fit(ours(tmp_path, tracker)) == plain
    assert time.monotonic() - started_s < 45  # far less than the time that the tracker hangs
    assert tracker.points == []
    release.set()


class RollBack(small.Watching):
    def __init__(self, backup: kd.BackupAndRestore) -> None:
        super().__init__()
        self.backup, self.batches = backup, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        if self.batches == 6:
            self.backup.roll_back()


def test_rolled_back(tmp_path: Path) -> None:
    """After a rollback, which repeats no batch, steps continue to count up."""
    tracker = Recorded()
    backup = kd.BackupAndRestore(tmp_path, save_freq=3, on_busy="wait", delete_checkpoint=False)
    fit([backup, kd.RunLog(trackers=[tracker]), RollBack(backup)])
    assert increases(tracker.steps_with("distplug/steps_per_second"))
    assert tracker.steps[-1] == EPOCHS * small.BATCHES
