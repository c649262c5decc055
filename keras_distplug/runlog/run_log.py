"""Logs the events and the time use of a run, in files next to its checkpoints."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import keras

from keras_distplug import __version__
from keras_distplug.backend.tensorflow import trainer
from keras_distplug.backend.tensorflow.runtime import callback_list, versions
from keras_distplug.callbacks.run_keeper import keeper_among
from keras_distplug.callbacks.watchdog import Watchdog
from keras_distplug.cluster import agreement
from keras_distplug.core import events, reporting, step_marker
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.event_lines import to_line
from keras_distplug.core.events import Entry, Event, ReplicaTimes, Window
from keras_distplug.core.interactive import is_interactive
from keras_distplug.core.ledger import Category, Ledger, split
from keras_distplug.core.log import announce
from keras_distplug.core.operating_system import unsuspended_s
from keras_distplug.core.process import started_at
from keras_distplug.core.step_marker import StepMarker
from keras_distplug.core.supervised import Supervised
from keras_distplug.python_state import json_values
from keras_distplug.runlog.chief_listeners import chief_listeners
from keras_distplug.runlog.goodput_curves import GoodputCurves
from keras_distplug.runlog.log_files import FOLDER, Log
from keras_distplug.runlog.sinks import open_sink
from keras_distplug.runlog.tracked_fit import TrackedFit
from keras_distplug.step.executions import Executions
from keras_distplug.step.step_reports import StepReport
from keras_distplug.step.step_windows import OwnWindows
from keras_distplug.storage.commit import Writer
from keras_distplug.storage.files import local_path, open_files
from keras_distplug.trackers.outbox import require_trackers
from keras_distplug.trackers.tracker import Tracker

_LEAST_SECS, _MOST_SECS, _SHARE = 1.0, 30.0, 0.01  # between windows


class RunLog(Watchdog):
    """Logs the events and the time use of a run, over all its attempts.

    Every worker appends lines of JSON to its own file, in the folder `log` of the run: the reports
    of the other callbacks of this package (checkpoints, stragglers, skipped updates, hangs), the
    use of every window of time, and a heartbeat every 5 s. `keras-distplug goodput`, `watch` and
    `report` and TensorBoard's tab read them. The files stay when training has finished.

    Example:

    ```python
    backup = kd.BackupAndRestore("runs/mnist", delete_checkpoint=False)
    model.fit(ds, epochs=10, callbacks=[backup, kd.RunLog()])
    ```

    - It is one of `defaults()`; adding your own instance replaces that one.
    - Lines are written in a thread. A failed write is retried and reported once; training
      continues.
    - A window lasts a second at first, and up to half a minute later. Work since the last window of
      a process that is killed counts as lost time, not as steps.
    - Time spent waiting for data and for other replicas is measured like in `StragglerWatchdog`.
      It is not known for steps that XLA compiles (`jit_compile=True`, and Keras' `"auto"` on a
      single GPU), and waiting for data is not known if a single process runs several steps per
      execution. This time counts as productive, and `keras-distplug goodput` reports how much of it
      there is.

    Args:
        log_dir: A folder or URL for the files, shared by all workers. Defaults to `None`: the
            folder of the run of the `BackupAndRestore` among the callbacks.
        storage_options: Storage options for `log_dir`, as in `BackupAndRestore`. Defaults to
            `None`.
        trackers: Experiment trackers, such as `WandbTracker(project="mnist")` or
            `MlflowTracker("mnist")`, or objects with the methods of
            `keras_distplug.trackers.Tracker`. Each has one run for all attempts, to which the chief
            sends metrics and incidents from a thread. Defaults to none.

    Raises:
        ConfigurationError: If an argument is invalid; in `fit`, if there is no `log_dir` and either
            no `BackupAndRestore` or one that deletes its folder at the end.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        super().__init__()
        self.trackers = require_trackers(trackers)
        if log_dir is None and storage_options:
            raise ConfigurationError(
                "Expected `storage_options` only together with `log_dir`. Received: "
                "`storage_options` without `log_dir`. Pass `log_dir`, or omit `storage_options`: "
                "the log is then written to BackupAndRestore's directory, with its options."
            )
        self.log_dir = log_dir
        self._storage_options = dict(storage_options or {})
        self._files = None if log_dir is None else open_files(log_dir, storage_options)
        self._writes: _Writes | None = None  # None if another instance does the work

    # Keras' hooks, in the order in which they are called

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        trainer.adapt(model)
        self.close()
        # Here, because Keras traces the step before `on_train_begin`.
        if self.defers_to_other(callback_list.move_to_front(self)):
            return
        # Events that are reported before the run is known wait.
        self._writes = _Writes(OwnWindows(model, syncs=True), callback_list.Calling.now())

    def set_params(self, params: Mapping[str, Any]) -> None:
        super().set_params(params)
        if self._writes is not None:
            self._executions = Executions(self.model, params.get("steps"))

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._writes is None:
            return
        if self._writes.is_training:
            self._writes.switch(Category.EVALUATION)
        else:
            self._writes.windows.disable_counting()
            self.close()

    def on_predict_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self.on_test_begin(logs)

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        others = callback_list.move_to_front(self)
        if self._writes is None:
            return
        self._keeper = keeper_among(others)
        complaint = self._complaint()
        if complaint is not None:
            self.close()
            raise ConfigurationError(complaint)
        self._writes.windows.begin()
        self._writes.is_training = True

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._writes is None:
            return
        if not self._writes.was_open:
            self._open(self._writes)
        self._writes.epoch = epoch
        self._writes.windows.begin_epoch()

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._writes is not None:
            self._writes.begin_step()
            self._writes.windows.begin_step()
            self._executions.begin()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._writes is not None:
            self._writes.windows.end_step()
            self._writes.end_step(self._executions.end(), (logs or {}).get("loss"))

    def on_test_end(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._writes is not None:
            self._writes.switch(Category.OTHER)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._writes is not None:
            self._writes.end_epoch(epoch, logs)

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._writes is None:
            return
        self._writes.end_window()
        if self._keeper is None:
            step, epochs = self._writes.step, self.params.get("epochs", 1)
            reporting.report(events.Finished(step, epochs, bool(self.model.stop_training)))

    def close(self) -> None:
        """Closes the log."""
        if self._writes is not None:
            self._writes.close()
            self._writes.windows.close()
            self._writes = None

    # How

    def _complaint(self) -> str | None:
        if self._files is not None:
            return None
        if self._keeper is None:
            return (
                "RunLog needs a folder: give it `log_dir`, or add a "
                "keras_distplug.BackupAndRestore, whose directory it then uses."
            )
        if self._keeper.delete_checkpoint:
            return (
                "RunLog would lose its files, because the BackupAndRestore deletes its directory "
                "at the end. Give RunLog a `log_dir`, or BackupAndRestore "
                "delete_checkpoint=False."
            )
        return None

    def _open(self, writes: _Writes) -> None:
        role = writes.windows.role
        words = agreement.get_channel(role)
        session = words.broadcast("log", Writer.new_attempt() if role.is_chief else None)
        if self._files is not None:
            files, folder, place = self._files, FOLDER, self.log_dir
            options: Mapping[str, Any] = self._storage_options
        else:
            assert self._keeper is not None
            run = self._keeper.context
            files, folder = run.files, f"{run.name}/{FOLDER}"
            place, options = run.directory, run.storage_options
        if self._keeper is None:  # the model may have been trained before
            writes.step = writes.windows.updates
        run_folder = folder.removesuffix(FOLDER).rstrip("/")
        supervised = Supervised.from_env() if role.is_chief else None
        marked = None if supervised is None else supervised.step_marker(files.where(run_folder))
        stem = f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%SZ}-{role.name}-{session[:8]}"
        began = events.Began(
            session=session,
            rank=role.rank,
            workers=role.world_size,
            replicas=self.model.distribute_strategy.num_replicas_in_sync,
            host=socket.gethostname(),
            pid=os.getpid(),
            strategy=type(self.model.distribute_strategy).__name__,
            epochs=self.params.get("epochs", 1),
            step=writes.step,
            versions=_versions(),
            resumes=self._keeper is not None,
            reached_before=None if marked is None else step_marker.read(marked),
            steps_per_epoch=int(self.params.get("steps") or 0) or None,
        )
        where = files.where(folder)

        def warn_of_failure(error: OSError) -> None:
            announce(f"the log of this run, in {where}, cannot be written ({error}); retrying")

        log = Log(
            open_sink(files, f"{folder}/{stem}"),
            warn_of_failure,
            _while_there(writes.lost),
            _while_there(writes.beat),
        )
        others: list[GoodputCurves | TrackedFit] = []
        if role.is_chief:
            others = chief_listeners(files, folder, began, writes.begins_at, self.trackers)
        writes.open(role.name, began, log, others)
        if supervised is not None and marked is not None:
            with contextlib.suppress(OSError):  # only the number of lost steps depends on it
                writes.marker = StepMarker(marked, session, writes.step)
            if place is not None:
                url = os.fspath(place)
                supervised.report_log_folder(str(local_path(url) or url), folder, options)


class _Writes:
    """One worker's log of one `fit`; listens to all reports."""

    def __init__(self, windows: OwnWindows, fit: callback_list.Calling | None) -> None:
        for each in reporting.listeners():
            if isinstance(each, _Writes):
                each.close_if_over()
        self._fit = fit
        self.is_training = False
        self.is_open = self.was_open = False
        self.epoch = 0
        self.step = 0  # batches since the run started
        self.windows = windows
        self.marker: StepMarker | None = None  # of the chief, under a supervisor
        self._steps = 0  # of this window
        self._is_first = True
        self._log: Log | None = None
        self._waiting: list[tuple[float, Event]] = []
        self._trains = threading.get_ident()
        self._begun_s = time.monotonic()
        begun_s = _begun_s()
        self._begun_at, self._at_s = time.time(), unsuspended_s()
        self.begins_at = self._begun_at - (time.monotonic() - begun_s)
        _hear_of_errors()
        self._others: Sequence[GoodputCurves | TrackedFit] = ()
        self._doing = Category.START_UP
        self._ledger = Ledger(begun_s, self._doing)
        self._loss: Any = None  # of the last step, as in its logs
        self._last_step_s = unsuspended_s()
        self._flushed_s = self._begun_s
        reporting.listen(self)

    def open(
        self,
        source: str,
        began: events.Began,
        log: Log,
        others: Sequence[GoodputCurves | TrackedFit],
    ) -> None:
        self._source, self._log, self._others = source, log, others
        for each in (log, *others):  # their threads would otherwise survive an error in `fit`
            weakref.finalize(self, each.close).atexit = False
        supervised = Supervised.from_env()
        self._job = None if supervised is None else supervised.job
        self._attempt = None if supervised is None else supervised.attempt
        self.is_open = self.was_open = True
        for at, event in [(self._now(), began), *self._waiting]:
            self._write(at, event)
        self._waiting.clear()

    # As a listener

    def on_event(self, event: Event) -> None:
        if isinstance(event, events.Restored):
            self.step = event.step
        is_last = isinstance(
            event, events.Finished | events.Preempted | events.PeerLost | events.Raised
        )
        if is_last or isinstance(event, events.RolledBack):
            self.end_window()  # with the steps so far
        now = self._now()
        if self.is_open:
            self._write(now, event)
        else:
            self._waiting.append((now, event))
        if is_last:
            self.close()
        elif isinstance(event, events.Hung) and self._log is not None:
            self._log.flush()

    def spent(self, category: Category, secs: float) -> None:
        self._ledger.spent(category, secs, time.monotonic())

    # During training

    def switch(self, category: Category) -> None:
        self._doing = category
        self._ledger.switch(category, time.monotonic())

    def begin_step(self) -> None:
        if not self._is_first:
            self.switch(Category.STEP)

    def end_step(self, batches: int, loss: Any) -> None:
        self._is_first = False
        now_s = time.monotonic()
        self._doing = Category.OTHER
        self._ledger.switch(self._doing, now_s)
        self._last_step_s = unsuspended_s()
        self._loss = loss
        self.step += batches
        self._steps += batches
        if self.marker is not None:
            self.marker.store(self.step)
        pause_s = min(max(_LEAST_SECS, _SHARE * (now_s - self._begun_s)), _MOST_SECS)
        if now_s - self._flushed_s >= pause_s:
            self.end_window()

    def end_epoch(self, epoch: int, logs: Mapping[str, Any] | None) -> None:
        numbers = json_values.numbers(logs or {})
        self.end_window()
        reporting.report(events.EpochEnded(epoch, self.step, numbers))

    def end_window(self) -> None:
        """Writes the use of the time since the last window."""
        if not self.is_open:
            return
        self._flushed_s = time.monotonic()
        secs, steps, self._steps = self._ledger.take(self._flushed_s), self._steps, 0
        report = self.windows.end_window()
        if report is not None:
            # Waiting time that is not known stays with the steps.
            waits_s = {
                Category.INPUT: report.input_total_s or 0.0,
                Category.SYNC: report.sync_total_s or 0.0,
            }
            secs = split(secs, Category.STEP, waits_s)
        loss = float(self._loss) if steps and isinstance(self._loss, int | float) else None
        self._write(self._now(), _window(self.step, steps, self.epoch, secs, report, loss))

    def close_if_over(self) -> None:
        """Closes the log if an error has ended its `fit`."""
        if self._fit is None or not self._fit.is_above(sys._getframe()):
            self.close()

    def close(self) -> None:
        reporting.listen_no_more(self)
        self.is_open = False
        for each in self._others:
            each.close()
        self._others = ()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _write(self, at: float, event: Event) -> None:
        if self._log is not None:
            self._log.append(self._line(at, event), is_minor=isinstance(event, Window))
        for each in self._others:
            each.on_event(at, event)

    def _now(self) -> float:
        """Returns seconds since 1970; within one `fit`, setting the clock has no effect."""
        return self._begun_at + (unsuspended_s() - self._at_s)

    # From the log's thread

    def lost(self, lines: int) -> bytes:
        return self._line(self._now(), events.LinesLost(lines))

    def beat(self) -> bytes | None:
        trains = sys._current_frames().get(self._trains)
        is_there = self._fit is not None and self._fit.is_above(trains)
        if not is_there:
            return None
        idle_s = round(unsuspended_s() - self._last_step_s, 3)
        return self._line(self._now(), events.Beat(self.step, str(self._doing), idle_s))

    def _line(self, at: float, event: Event) -> bytes:
        return to_line(Entry(at, self._source, event, self._job, self._attempt))


def _window(
    step: int,
    steps: int,
    epoch: int,
    secs: Mapping[Category, float],
    report: StepReport | None,
    loss: float | None,
) -> Window:
    spent = {str(category): round(each_s, 6) for category, each_s in secs.items() if each_s}
    if report is None:
        return Window(step, steps, epoch, spent, loss=loss)
    return Window(
        step,
        steps,
        epoch,
        spent,
        report.step_s,
        report.input_s,
        report.memory_bytes,
        tuple(ReplicaTimes(each.replica, each.compute_s, each.sync_s) for each in report.replicas),
        loss,
    )


def _while_there(method: Callable[..., bytes | None]) -> Callable[..., bytes | None]:
    """Wraps a method so that the log's thread does not keep its object alive."""
    there = weakref.WeakMethod(method)

    def call(*args: Any) -> bytes | None:
        found = there()
        return None if found is None else found(*args)

    return call


@functools.cache
def _hear_of_errors() -> None:
    """Logs errors that end the process, in the log of the `fit` that they have ended."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        for listener in reporting.listeners():
            if isinstance(listener, _Writes):
                listener.on_event(events.Raised(f"{kind.__name__}: {error}"))

    sys.excepthook = hook


_has_begun = False  # a `fit` of this process


def _begun_s() -> float:
    """Returns the start of the process for its first `fit`, and now for others, by
    `time.monotonic`."""
    global _has_begun
    is_first, _has_begun = not _has_begun, True
    is_of_process = is_first and not is_interactive()
    return time.monotonic() - (time.time() - started_at() if is_of_process else 0.0)


def _versions() -> dict[str, str]:
    found = {"keras_distplug": __version__}
    for name in ("keras", "tensorflow"):
        if (installation := versions.find(name)) is not None:  # of any distribution
            found[name] = installation.version
    return found
