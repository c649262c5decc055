"""Logs the events and the time use of a run, in files next to its checkpoints."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import weakref
from collections.abc import Callable, Mapping, Sequence
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
from keras_distplug.core.ledger import Category
from keras_distplug.core.log import announce
from keras_distplug.core.step_marker import StepMarker
from keras_distplug.core.supervised import Supervised
from keras_distplug.runlog.chief_listeners import chief_listeners
from keras_distplug.runlog.fit_log import FitLog
from keras_distplug.runlog.goodput_curves import GoodputCurves
from keras_distplug.runlog.log_files import FOLDER, Log
from keras_distplug.runlog.sinks import open_sink
from keras_distplug.runlog.tracked_fit import TrackedFit
from keras_distplug.step.executions import Executions
from keras_distplug.step.step_windows import OwnWindows
from keras_distplug.storage.commit import Writer
from keras_distplug.storage.files import local_path, open_files
from keras_distplug.trackers.outbox import require_trackers
from keras_distplug.trackers.tracker import Tracker


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
        self._fit_log: FitLog | None = None  # None if another instance does the work

    # Keras' hooks, in the order in which they are called

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        trainer.adapt(model)
        self.close()
        # Here, because Keras traces the step before `on_train_begin`.
        if self.defers_to_other(callback_list.move_to_front(self)):
            return
        # Events that are reported before the run is known wait.
        self._fit_log = FitLog(OwnWindows(model, syncs=True), callback_list.Calling.now())

    def set_params(self, params: Mapping[str, Any]) -> None:
        super().set_params(params)
        if self._fit_log is not None:
            self._executions = Executions(self.model, params.get("steps"))

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._fit_log is None:
            return
        if self._fit_log.is_training:
            self._fit_log.switch(Category.EVALUATION)
        else:
            self._fit_log.windows.disable_counting()
            self.close()

    def on_predict_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self.on_test_begin(logs)

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        others = callback_list.move_to_front(self)
        if self._fit_log is None:
            return
        self._keeper = keeper_among(others)
        complaint = self._complaint()
        if complaint is not None:
            self.close()
            raise ConfigurationError(complaint)
        self._fit_log.windows.begin()
        self._fit_log.is_training = True

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._fit_log is None:
            return
        if not self._fit_log.was_open:
            self._open(self._fit_log)
        self._fit_log.epoch = epoch
        self._fit_log.windows.begin_epoch()

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._fit_log is not None:
            self._fit_log.begin_step()
            if self._executions.batches_each is None:
                self._executions.begin()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._fit_log is not None:
            batches = self._executions.batches_each or self._executions.end()
            self._fit_log.end_step(batches, logs["loss"] if logs and "loss" in logs else None)

    def on_test_end(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._fit_log is not None:
            self._fit_log.switch(Category.OTHER)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._fit_log is not None:
            self._fit_log.end_epoch(epoch, logs)

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._fit_log is None:
            return
        self._fit_log.end_window()
        if self._keeper is None:
            step, epochs = self._fit_log.step, self.params.get("epochs", 1)
            reporting.report(events.Finished(step, epochs, bool(self.model.stop_training)))

    def close(self) -> None:
        """Closes the log."""
        if self._fit_log is not None:
            self._fit_log.close()
            self._fit_log.windows.close()
            self._fit_log = None

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

    def _open(self, fit_log: FitLog) -> None:
        role = fit_log.windows.role
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
            fit_log.step = fit_log.windows.updates
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
            step=fit_log.step,
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
            _while_there(fit_log.lost),
            _while_there(fit_log.beat),
        )
        others: list[GoodputCurves | TrackedFit] = []
        if role.is_chief:
            others = chief_listeners(files, folder, began, fit_log.begins_at, self.trackers)
        fit_log.open(role.name, began, log, others)
        if supervised is not None and marked is not None:
            with contextlib.suppress(OSError):  # only the number of lost steps depends on it
                fit_log.marker = StepMarker(marked, session, fit_log.step)
            if place is not None:
                url = os.fspath(place)
                supervised.report_log_folder(str(local_path(url) or url), folder, options)


def _while_there(method: Callable[..., bytes | None]) -> Callable[..., bytes | None]:
    """Wraps a method so that the log's thread does not keep its object alive."""
    there = weakref.WeakMethod(method)

    def call(*args: Any) -> bytes | None:
        found = there()
        return None if found is None else found(*args)

    return call


def _versions() -> dict[str, str]:
    found = {"keras_distplug": __version__}
    for name in ("keras", "tensorflow"):
        if (installation := versions.find(name)) is not None:  # of any distribution
            found[name] = installation.version
    return found
