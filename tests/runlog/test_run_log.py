"""The log of a run, with all its attempts."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from support import small  # noqa: E402
from support.curves import curves_in, texts_in  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.checkpoint import saver  # noqa: E402
from keras_distplug.core import events, reporting  # noqa: E402
from keras_distplug.core.event_lines import from_line, to_line  # noqa: E402
from keras_distplug.core.events import Event, Window  # noqa: E402
from keras_distplug.core.ledger import Category  # noqa: E402
from keras_distplug.replicas.stragglers import Straggler  # noqa: E402
from keras_distplug.runlog import (  # noqa: E402
    goodput_totals,
    log_files,
)
from keras_distplug.runlog.goodput_totals import Fit  # noqa: E402
from keras_distplug.storage.files import open_files  # noqa: E402
from keras_distplug.storage.stores.remote import RemoteFiles  # noqa: E402


@pytest.fixture(autouse=True)
def every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs a window for every batch."""
    monkeypatch.setattr("keras_distplug.runlog.fit_log._LEAST_SECS", 0.0)
    monkeypatch.setattr("keras_distplug.runlog.fit_log._SHARE", 0.0)


@pytest.fixture(autouse=True)
def no_remaining_listeners() -> Any:
    yield
    for listener in reporting.listeners():
        reporting.listen_no_more(listener)


def fit(
    callbacks: list[keras.callbacks.Callback], *others: keras.callbacks.Callback, **arguments: Any
) -> keras.Model:
    model = small.model()
    arguments = {"x": small.X, "y": small.Y, "batch_size": 8, "epochs": 3, **arguments}
    model.fit(verbose=0, callbacks=[*callbacks, *others], **arguments)
    return model


def logged(folder: Any, run: str = "run-0001") -> list[Fit]:
    """Returns every `fit` of a run, after writing all buffered lines."""
    log_files._close_all()
    return log_files.read(open_files(folder), run)[0]


def of_kind(fit: Fit, kind: type[Event]) -> list[Any]:
    return [entry.event for entry in fit.entries if isinstance(entry.event, kind)]


def names(fit: Fit) -> list[str]:
    return [type(entry.event).__name__ for entry in fit.entries]


def test_defaults(tmp_path: Path) -> None:
    """`defaults()` keeps a log, with the start, every epoch, every checkpoint and the end."""
    fit(kd.defaults(tmp_path, save_freq="epoch"), validation_data=(small.X, small.Y))
    [found] = logged(tmp_path)
    assert isinstance(found.entries[0].event, events.Began)
    began = found.began
    assert (began.rank, began.workers, began.replicas, began.epochs, began.step) == (0, 1, 1, 3, 0)
    assert began.versions["keras"] == keras.__version__
    assert began.steps_per_epoch == 4
    losses = [window.loss for window in of_kind(found, events.Window) if window.steps]
    assert losses
    assert all(isinstance(loss, float) and loss > 0 for loss in losses)
    epochs = of_kind(found, events.EpochEnded)
    assert [(each.epoch, each.step) for each in epochs] == [(0, 4), (1, 8), (2, 12)]
    assert set(epochs[0].logs) == {"loss", "mae", "val_loss", "val_mae"}
    saved = of_kind(found, events.Saved)
    assert saved[-1].step == 12
    assert saved[-1].checkpoint_bytes > 500
    assert isinstance(found.entries[-1].event, events.Finished)
    assert found.entries[-1].event == events.Finished(12, 3, False)


def test_windows(tmp_path: Path) -> None:
    """Windows follow each other without a gap, count every step once, and extend to the end."""
    started_at = time.time()
    fit(kd.defaults(tmp_path, save_freq="epoch"), validation_data=(small.X, small.Y))
    [found] = logged(tmp_path)
    windows = [entry for entry in found.entries if isinstance(entry.event, Window)]
    assert sum(each.event.steps for each in windows) == 12
    for before, after in itertools.pairwise(windows):
        assert after.at - before.at == pytest.approx(sum(after.event.secs.values()), abs=0.05)
    secs = goodput_totals.totals(goodput_totals.spans([found]))
    assert all(value >= 0 for value in secs.values())
    spent = {category for category, value in secs.items() if value}
    expected = {Category.STEP, Category.START_UP, Category.SAVE, Category.EVALUATION}
    assert expected <= spent
    assert not spent & {Category.REDONE, Category.RECOVERY, Category.SYNC}
    assert found.ends_at - found.begins_at == pytest.approx(sum(secs.values()), abs=0.05)
    assert found.ends_at <= time.time()
    assert found.ends_at > started_at


def test_waits_for_data(tmp_path: Path) -> None:
    """Time that a step waits for its data is not progress."""

    def slow(x: Any, y: Any) -> Any:
        def wait(x: Any) -> Any:
            time.sleep(0.05)
            return x

        waited = tf.numpy_function(wait, [x], tf.float32)
        waited.set_shape(x.shape)
        return waited, y

    data = tf.data.Dataset.from_tensor_slices((small.X, small.Y)).batch(8).map(slow)
    fit(kd.defaults(tmp_path, save_freq="epoch"), x=data, y=None, batch_size=None)
    [found] = logged(tmp_path)
    secs = goodput_totals.totals(goodput_totals.spans([found]))
    assert secs[Category.INPUT] > secs[Category.STEP]
    assert secs[Category.INPUT] > 11 * 0.05 * 0.8


@pytest.fixture
def one_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs one window per epoch."""
    monkeypatch.setattr("keras_distplug.runlog.fit_log._LEAST_SECS", 1e9)
    monkeypatch.setattr("keras_distplug.runlog.fit_log._MOST_SECS", 1e9)


def stalling(batches: int, every: int, secs: float) -> tf.data.Dataset:
    """Returns data of unknown length in which one of `every` batches is late."""

    def wait(number: Any, x: Any) -> Any:
        time.sleep(secs if number % every == every - 1 else 0)
        return x

    def late(number: Any, x: Any) -> Any:
        waited = tf.numpy_function(wait, [number, x], tf.float32)
        waited.set_shape(x.shape)
        return waited, x[:, :1]

    numbered = tf.data.Dataset.from_tensors(small.X[:8]).repeat(batches).enumerate().map(late)
    # TensorFlow would prefetch: the previous step would hide a part of a stall.
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return numbered.filter(lambda x, y: True).with_options(options)


@pytest.mark.usefixtures("one_window")
@pytest.mark.parametrize("kept", [10_000, 7])
def test_some_batches_are_late(kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for data is counted even if most steps do not wait, however many steps a window has,
    and if the end of the data was not known in advance."""
    monkeypatch.setattr("keras_distplug.step.stopwatch._KEPT", kept)
    monkeypatch.setattr("keras_distplug.step.step_windows._MOST_IN_GRAPH", kept)
    fit([kd.RunLog(tmp_path)], x=stalling(40, 5, 0.1), y=None, batch_size=None, epochs=1)
    [found] = logged(tmp_path, "")
    [window] = [each for each in of_kind(found, Window) if each.steps]
    assert window.steps == 40
    assert window.input_s is not None
    assert window.input_s >= 8 * 0.1 / 40
    assert window.secs["input"] >= 8 * 0.1 * 0.999
    assert goodput_totals.unknown_waits([found]) == {}


@pytest.mark.usefixtures("one_window")
@pytest.mark.parametrize("compiled", [{"steps_per_execution": 2}, {"jit_compile": True}])
def test_unknown_waits(compiled: dict[str, Any], tmp_path: Path) -> None:
    """Unknown waiting times are reported as unknown, and not counted as zero."""
    model = small.model()
    model.compile("adam", "mse", **compiled)
    log = kd.RunLog(tmp_path)
    model.fit(small.X, small.Y, batch_size=4, verbose=0, callbacks=[log])
    [found] = logged(tmp_path, "")
    [window] = [each for each in of_kind(found, Window) if each.steps]
    assert window.input_s is None
    assert "input" not in window.secs or not window.secs["input"]
    assert goodput_totals.unknown_waits([found]) == {Category.INPUT: window.secs["step"]}


class SlowToTrace(keras.Model):
    def train_step(self, data: Any) -> Any:
        time.sleep(1)
        return super().train_step(data)


@pytest.mark.usefixtures("one_window")
def test_retraced(tmp_path: Path) -> None:
    """Time for a trace does not count as waiting for data, even if a replica starts after it: here,
    a trace for a batch that leaves one replica without samples."""
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        inputs = keras.Input((4,))
        model = SlowToTrace(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices((small.X[:25], small.Y[:25])).batch(8)
    kd.adapt(model).fit(data, verbose=0, callbacks=[kd.RunLog(tmp_path)])
    [found] = logged(tmp_path, "")
    [window] = [each for each in of_kind(found, Window) if each.steps]
    assert window.steps == 4
    assert window.secs["step"] >= 1
    assert window.input_s is not None
    assert window.secs["input"] < 1


def test_nothing_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An attempt that ended before its first checkpoint counts as an attempt of the same run."""
    with pytest.raises(small.Interrupted):
        fit(kd.defaults(tmp_path, save_freq="epoch"), small.Stop(0, 2))
    saver.wait_for_all()
    fit(kd.defaults(tmp_path, save_freq="epoch"))
    assert (
        f"{tmp_path / 'run-0001'}: attempt 1 left no checkpoint after at least 3 "
        "steps; starting from scratch"
    ) in caplog.messages


def test_interrupted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The next attempt starts at the checkpoint, and reports the lost steps; training them again
    does not count as progress."""
    callbacks = kd.defaults(tmp_path, save_freq=4)
    callbacks[0].saving = kd.Saving(on_busy="wait")
    with pytest.raises(small.Interrupted):
        fit(callbacks, small.Stop(1, 2))
    saver.wait_for_all()
    fit(kd.defaults(tmp_path, save_freq=4))
    line = next(each for each in caplog.messages if "resuming at" in each)
    assert line.endswith(
        "step-00000004: resuming at epoch 1/3, batch 5, step 4 "
        "(attempt 2; the log of attempt 1 ends at step 7)"
    )
    first, second = logged(tmp_path)
    assert (first.last_step, second.began.step) == (7, 4)
    assert names(second)[1] == "Restored"
    [restored] = of_kind(second, events.Restored)
    assert (restored.step, restored.epoch, restored.batch) == (4, 0, 4)
    told = goodput_totals.attempts([first, second])
    assert [(each.first_step, each.last_step, each.lost_steps) for each in told] == [
        (0, 7, 3),
        (4, 12, 0),
    ]
    assert [each.end for each in told] == [None, "finished"]
    secs = goodput_totals.totals(goodput_totals.spans([first, second]))
    assert secs[Category.REDONE] > 0
    assert secs[Category.RESTORE] == pytest.approx(restored.secs, abs=0.05)
    again = [each for each in of_kind(second, Window) if 4 < each.step <= 7]
    assert sum(each.steps for each in again) == 3


def test_curves(tmp_path: Path) -> None:
    """TensorBoard shows goodput over the seconds since the first attempt started, and the shares of
    time, which sum to one."""
    with pytest.raises(small.Interrupted):
        fit(kd.defaults(tmp_path, save_freq="epoch"), small.Stop(1, 2))
    fit(kd.defaults(tmp_path, save_freq="epoch"))
    fits = logged(tmp_path)
    curves = curves_in(tmp_path / "run-0001" / "log")["goodput"]
    points = curves["goodput/whole_run"]
    windows = [window for found in fits for window in of_kind(found, Window)]
    assert len(points) == len(windows)
    assert [step for step, _ in points] == sorted(step for step, _ in points)
    secs = goodput_totals.totals(goodput_totals.spans(fits))
    assert points[-1][1] == pytest.approx(goodput_totals.goodput(secs), rel=0.05)
    shares = [values[-1][1] for name, values in curves.items() if name.startswith("time/")]
    assert sum(shares) == pytest.approx(1, abs=1e-3)
    assert "time/redone" in curves


def test_texts(tmp_path: Path) -> None:
    """TensorBoard's tab "Text" shows the events of all attempts, including a supervisor's since the
    previous attempt, every one at a distinct step."""
    with pytest.raises(small.Interrupted):
        fit(kd.defaults(tmp_path, save_freq="epoch"), small.Stop(1, 2))
    saver.wait_for_all()
    [first] = logged(tmp_path)
    failed = events.Failed("worker-0", "error", 1, "worker-0 exited with code 1")
    entry = events.Entry(first.ends_at + 0.001, "supervisor", failed, "job", 1)
    log = tmp_path / "run-0001" / "log"
    (log / "supervisor-job.jsonl").write_bytes(to_line(entry))
    fit(kd.defaults(tmp_path, save_freq="epoch"))
    steps, texts = zip(*texts_in(log / "goodput", "distplug/events"), strict=True)
    assert len(set(steps)) == len(steps)
    assert list(steps) == sorted(steps)
    begins = "training starts with 1 workers, 1 replicas"
    assert texts[0] == begins
    # The first attempt may end before its checkpoint is complete, which is not logged then.
    place = texts.index("**worker-0 exited with code 1**")
    assert texts[place + 1] == begins
    assert texts[place + 2].startswith("training resumes after step 4, from ")
    assert texts[-1] == "training finished after step 12"


def test_nested_fit(tmp_path: Path) -> None:
    """A `fit` that a callback calls has its own log, and the outer log continues afterwards."""

    class Inner(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                fit(kd.defaults(tmp_path / "inner", save_freq="epoch"))

    fit(kd.defaults(tmp_path / "outer", save_freq="epoch"), Inner())
    [inner], [outer] = logged(tmp_path / "inner"), logged(tmp_path / "outer")
    for found in (inner, outer):
        assert [each.epoch for each in of_kind(found, events.EpochEnded)] == [0, 1, 2]
        assert names(found).count("Finished") == 1
        assert names(found)[-1] == "Finished"


def test_model_is_released_after_an_error(tmp_path: Path) -> None:
    """After an error that ended `fit`, the log keeps neither the model nor its threads alive."""
    model = small.model()
    callbacks = [kd.RunLog(tmp_path), small.Stop(1, 2)]
    with pytest.raises(small.Interrupted):
        model.fit(small.X, small.Y, batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
    assert _threads()
    let_go = weakref.ref(model)
    del model, callbacks
    gc.collect()
    assert let_go() is None
    assert not _threads()


def _threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name in ("keras_distplug-log", "keras_distplug-goodput")]


def test_already_finished(tmp_path: Path) -> None:
    """A finished run that is started again trains nothing, and logs nothing."""
    fit(kd.defaults(tmp_path, save_freq="epoch"))

    fit(kd.defaults(tmp_path, save_freq="epoch"))
    assert len(logged(tmp_path)) == 1


def test_skipped_update(tmp_path: Path) -> None:
    """A skipped update is logged, with its replica and the variable that caused it."""
    x = small.X.copy()
    x[8:16] = np.nan
    fit(kd.defaults(tmp_path, save_freq="epoch"), x=x, epochs=1, shuffle=False)
    [found] = logged(tmp_path)
    [left_out] = of_kind(found, events.UpdateLeftOut)
    assert (left_out.epoch, left_out.batch, left_out.in_a_row) == (0, 1, 1)
    assert left_out.replicas == (0,)
    assert left_out.variable is not None
    assert left_out.origin is not None
    assert "32 of 32 values in `x` are not finite" in left_out.what


def test_rolled_back(tmp_path: Path) -> None:
    x = np.concatenate([small.X[:16], np.full((16, 4), np.nan, "float32"), small.X[:8]])
    y = np.concatenate([small.Y[:16], small.Y[:16], small.Y[:8]])
    callbacks = kd.defaults(tmp_path, save_freq=1)
    callbacks[0].saving = kd.Saving(on_busy="wait")
    fit(callbacks, kd.NaNWatchdog(max_skips=1), x=x, y=y, epochs=1, shuffle=False)
    [found] = logged(tmp_path)
    [rolled_back] = of_kind(found, events.RolledBack)
    assert (rolled_back.to_step, rolled_back.times) == (3, 1)


def test_saves_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every failed save is logged, with its reason."""
    stock = "keras_distplug.storage.commit.Writer.save"

    def fails(*_: Any) -> None:
        raise OSError("the disk is gone")

    callbacks = kd.defaults(tmp_path, save_freq="epoch")
    callbacks[0].saving = kd.Saving(on_busy="wait", max_failed_saves=9)
    monkeypatch.setattr(stock, fails)
    with (
        pytest.raises(OSError, match="the disk is gone"),
        pytest.warns(UserWarning, match="Saving a checkpoint failed"),
    ):
        fit(callbacks)
    [found] = logged(tmp_path)
    failed = of_kind(found, events.SaveFailed)
    assert [each.in_a_row for each in failed] == [*range(1, len(failed) + 1)]
    assert len(failed) >= 3
    assert failed[0].why == "the disk is gone"


def test_damaged(tmp_path: Path) -> None:
    """A quarantined checkpoint is logged."""
    callbacks = kd.defaults(tmp_path, save_freq="epoch")
    callbacks[0].saving = kd.Saving(on_busy="wait")
    with pytest.raises(small.Interrupted):
        fit(callbacks, small.Stop(2, 1))
    saver.wait_for_all()
    for shard in tmp_path.glob("run-0001/step-00000008/*/*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-9])
    with pytest.warns(UserWarning, match="quarantined"):
        fit(kd.defaults(tmp_path, save_freq="epoch"))
    _, second = logged(tmp_path)
    [quarantined] = of_kind(second, events.Quarantined)
    assert "step-00000008" in quarantined.checkpoint
    assert second.began.step == 4


def test_preempted(tmp_path: Path) -> None:
    """A preemption is logged, with its cause, the worker that was notified, and the checkpoint."""
    handler = kd.PreemptionHandler(exit=False, cloud=False)

    class Preempts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if not handler._received:
                os.kill(os.getpid(), signal.SIGTERM)
                _wait_until(lambda: handler._stop.is_due() is not None)

    with pytest.raises(kd.errors.Preempted):
        fit(kd.defaults(tmp_path, save_freq="epoch"), handler, Preempts())
    [found] = logged(tmp_path)
    [told] = of_kind(found, events.Preempted)
    assert (told.what, told.is_user) == ("SIGTERM", False)
    assert told.where.startswith("worker-0 on ")
    assert told.step == found.last_step
    [attempt] = goodput_totals.attempts([found])
    assert attempt.end is not None
    assert attempt.end.startswith("SIGTERM to worker-0")


def test_hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hang is logged while it lasts, with its description."""
    told = threading.Event()

    def report(event: Event) -> None:
        reporting.report(event)
        told.set()

    class Hangs(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if (self.params["epochs"], batch) == (3, 2) and not told.is_set():
                assert told.wait(60)

    monkeypatch.setattr("keras_distplug.hang.hang_watchdog.report", report)
    fit(kd.defaults(tmp_path, save_freq="epoch"), Hangs(), kd.HangWatchdog(step_secs=1, exit=False))
    [found] = logged(tmp_path)
    [hung] = of_kind(found, events.Hung)
    assert hung.what.startswith("worker-0 ")
    assert "in batch 3 of epoch 1" in hung.what


def test_straggler(tmp_path: Path) -> None:
    straggler = Straggler("compute", 1, "worker-1 on a", 3, 0.2, 0.1, None)

    class Reports(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                kd.StragglerWatchdog()._report_found(straggler)

    fit(kd.defaults(tmp_path, save_freq="epoch"), Reports())
    [found] = logged(tmp_path)
    [told] = of_kind(found, events.SlowReplica)
    assert (told.cause, told.rank, told.replica, told.own_s) == ("compute", 1, 3, 0.2)
    assert told.what == str(straggler)


def _wait_until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_own_folder(tmp_path: Path) -> None:
    """Without a BackupAndRestore, the log is in the given folder. The user's own instance replaces
    the one of `defaults()`."""
    fit([kd.RunLog(tmp_path / "a")])
    [found] = logged(tmp_path / "a", "")
    assert found.entries[-1].event == events.Finished(12, 3, False)
    fit([kd.RunLog(tmp_path / "b"), *kd.defaults(tmp_path / "c", save_freq="epoch")])
    assert len(logged(tmp_path / "b", "")) == 1
    assert not (tmp_path / "c" / "run-0001" / "log").exists()


def test_consecutive_fits(tmp_path: Path) -> None:
    """Without a BackupAndRestore, every `fit` is a separate training: that of another model repeats
    nothing, and that of the same model continues."""
    model = fit([kd.RunLog(tmp_path)])
    fit([kd.RunLog(tmp_path)])
    model.fit(small.X, small.Y, batch_size=8, verbose=0, callbacks=[kd.RunLog(tmp_path)])
    fits = logged(tmp_path, "")
    assert [(each.began.step, each.last_step) for each in fits] == [(0, 12), (0, 12), (12, 16)]
    assert not goodput_totals.totals(goodput_totals.spans(fits))[Category.REDONE]
    assert [each.lost_steps for each in goodput_totals.attempts(fits)] == [0, 0, 0]


def test_clock_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one `fit`, times and steps of curves never decrease, even if the clock is set back."""
    stock, back_s = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: stock() - back_s[0])

    class SetsBack(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            back_s[0] = 1800.0

    fit([kd.RunLog(tmp_path)], SetsBack())
    [found] = logged(tmp_path, "")
    times = [entry.at for entry in found.entries]
    assert times == sorted(times)
    spans = goodput_totals.spans([found])
    assert spans[-1].step == 12
    [curves] = curves_in(tmp_path / "log").values()
    steps = [step for step, _ in curves["goodput/whole_run"]]
    assert len(steps) == len(of_kind(found, Window))
    assert steps == sorted(steps)


def test_ended_by_nan_watchdog(tmp_path: Path) -> None:
    """If NaNWatchdog ends training, its error is the logged end."""
    x = np.full_like(small.X, np.nan)
    watchdog = kd.NaNWatchdog(max_skips=1, max_rollbacks=0)
    with pytest.raises(kd.errors.NonFiniteError):
        fit([kd.RunLog(tmp_path)], watchdog, x=x)
    [found] = logged(tmp_path, "")
    assert isinstance(found.entries[-1].event, events.Raised)
    [attempt] = goodput_totals.attempts([found])
    assert attempt.end is not None
    assert attempt.end.startswith("NonFiniteError: 2 consecutive updates skipped (non-finite")


_FAILS = """
import sys
import keras
from support import small
import keras_distplug as kd

class Fails(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise ValueError("no room")

small.model().fit(small.X, small.Y, verbose=0, callbacks=[kd.RunLog(sys.argv[1]), Fails()])
"""


@pytest.mark.timeout(300)
def test_error_that_ends_the_process(tmp_path: Path) -> None:
    """An error that ends the process is the last log entry, and Python reports it as usual."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", _FAILS, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": paths},
        stderr=subprocess.PIPE,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 1
    assert ended.stderr.count("ValueError: no room") == 1
    [found] = logged(tmp_path, "")
    assert found.entries[-1].event == events.Raised("ValueError: no room")
    assert goodput_totals.attempts([found])[0].end == "ValueError: no room"


def test_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """During a slow callback, heartbeats show that the process is alive, and its step. They stop
    after an error that ended `fit`."""
    monkeypatch.setattr(log_files, "_BEAT_SECS", 0.02)
    beats = tmp_path / "log"

    def count() -> int:
        return sum(path.read_bytes().count(b'"doing":"other"') for path in beats.glob("*.jsonl"))

    class Waits(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            _wait_until(lambda: count() >= 2)
            raise small.Interrupted

    callbacks = [kd.RunLog(tmp_path), Waits()]
    with pytest.raises(small.Interrupted):
        fit(callbacks)
    fit_log = callbacks[0]._fit_log
    assert fit_log is not None
    assert fit_log.beat() is None
    [path] = beats.glob("*.jsonl")
    *_, last = [line for line in path.read_bytes().splitlines() if b'"event":"beat"' in line]
    entry = from_line(last)
    assert entry is not None
    assert isinstance(entry.event, events.Beat)
    assert (entry.event.step, entry.event.doing) == (4, "other")
    assert 0 <= (entry.event.idle_s or 0) < 60


def test_in_a_store() -> None:
    """A log in a store can be read completely."""
    directory = f"memory://{uuid.uuid4().hex}"
    fit(kd.defaults(directory, save_freq="epoch"))
    [found] = logged(directory)
    assert names(found)[0] == "Began"
    assert names(found)[-1] == "Finished"


def test_curves_in_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard's files are uploaded to a store one after the other, as whole files."""
    monkeypatch.setattr("keras_distplug.runlog.sinks.UploadPace.every_secs", 0.0)
    directory = f"memory://{uuid.uuid4().hex}"
    fit(kd.defaults(directory, save_freq="epoch"))
    [found] = logged(directory)
    files, folder = open_files(directory), "run-0001/log/goodput"
    names_of_files = files.names(folder)
    windows = of_kind(found, Window)
    assert len(names_of_files) > len(windows) / 2
    copied = tmp_path / "goodput"
    copied.mkdir()
    for name in names_of_files:
        (copied / name).write_bytes(files.read(f"{folder}/{name}"))
    [curves] = curves_in(tmp_path).values()
    assert len(curves["goodput/whole_run"]) == len(windows)


def test_store_that_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Curves that a store does not accept are reported once, and training continues."""
    monkeypatch.setattr("keras_distplug.runlog.sinks.UploadPace.every_secs", 0.0)

    def fails(files: Any, path: str, parts: Any, stock: Any = RemoteFiles.create) -> None:
        if "tfevents" in path:
            raise OSError("no room")
        stock(files, path, parts)

    monkeypatch.setattr(RemoteFiles, "create", fails)
    directory = f"memory://{uuid.uuid4().hex}"
    fit(kd.defaults(directory, save_freq="epoch"))
    [found] = logged(directory)
    assert names(found)[-1] == "Finished"
    assert caplog.text.count("cannot be written for TensorBoard (no room); retrying") == 1


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (lambda folder: [kd.RunLog()], "give it `log_dir`, or add a keras_distplug"),
        (
            lambda folder: [kd.RunLog(), kd.BackupAndRestore(folder)],
            "Give RunLog a `log_dir`, or BackupAndRestore delete_checkpoint=False",
        ),
    ],
)
def test_without_a_folder(callbacks: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(kd.errors.ConfigurationError, match=message):
        fit(callbacks(tmp_path))
    assert not list(tmp_path.rglob("*"))


def test_options_without_a_folder() -> None:
    with pytest.raises(kd.errors.ConfigurationError, match="`storage_options` without `log_dir`"):
        kd.RunLog(storage_options={"endpoint_url": "http://127.0.0.1"})


def test_folder_that_cannot_be_written_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training continues, and the failure is reported once."""
    (tmp_path / "log").write_text("in the way")
    fit([kd.RunLog(tmp_path)])
    log_files._close_all()
    assert caplog.text.count("); retrying") == 1


def test_evaluate_and_predict(tmp_path: Path) -> None:
    """The callback has no effect in `evaluate` and `predict`."""
    model = fit([])
    model.evaluate(small.X, small.Y, verbose=0, callbacks=[kd.RunLog(tmp_path)])
    model.predict(small.X, verbose=0, callbacks=[kd.RunLog(tmp_path)])
    assert not list(tmp_path.iterdir())
    assert reporting.listeners() == []


@pytest.mark.parametrize("strategy", ["one", "mirrored"])
@pytest.mark.parametrize("executions", [1, 3])
def test_same_bits(strategy: str, executions: int, tmp_path: Path) -> None:
    """Training is bit-identical with and without the log, which has the times of all replicas."""

    def trained(*callbacks: keras.callbacks.Callback) -> list[bytes]:
        chosen = tf.distribute.get_strategy()
        if strategy == "mirrored":
            chosen = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with chosen.scope():
            model = small.model()
            model.compile("adam", "mse", steps_per_execution=executions)
        data = tf.data.Dataset.from_tensor_slices((small.X, small.Y)).batch(8)
        kd.adapt(model).fit(data, epochs=3, verbose=0, callbacks=list(callbacks))
        return small.state(model)

    assert trained(kd.RunLog(tmp_path)) == trained()
    [found] = logged(tmp_path, "")
    windows = of_kind(found, Window)
    assert sum(each.steps for each in windows) == 12
    replicas = {each.replica for window in windows for each in window.replicas}
    assert replicas == ({0} if strategy == "one" else {0, 1})
    if strategy == "mirrored":
        syncs = [each.sync_s for window in windows for each in window.replicas]
        assert all(sync is not None for sync in syncs)
