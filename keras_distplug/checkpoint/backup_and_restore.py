"""A drop-in replacement for `keras.callbacks.BackupAndRestore` that several workers can share."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Unpack

import keras

from keras_distplug.backend.tensorflow import trainer
from keras_distplug.backend.tensorflow.input import epochs
from keras_distplug.backend.tensorflow.runtime import keras_callbacks, models
from keras_distplug.backend.tensorflow.runtime.callback_list import move_to_end
from keras_distplug.callbacks.run_keeper import RunContext, RunKeeper
from keras_distplug.callbacks.watchdog import require_made
from keras_distplug.checkpoint import best_epochs, capture, exports, opening, same_start, saver
from keras_distplug.checkpoint import resuming as resuming_
from keras_distplug.checkpoint.cadence import Cadence, Pace, SaveFreq, get_cadence
from keras_distplug.checkpoint.candidates import Candidate, Candidates
from keras_distplug.checkpoint.fit_state import FitState
from keras_distplug.checkpoint.holding import Hold
from keras_distplug.checkpoint.local_tier import LocalTier
from keras_distplug.checkpoint.saves import CheckpointWriter, Saves, is_finite, save_all_in_time
from keras_distplug.checkpoint.settings import (
    RESUMING,
    RETENTION,
    SAVING,
    LocalCheckpoints,
    Resuming,
    Saving,
    Settings,
    Single,
)
from keras_distplug.cluster import agreement
from keras_distplug.cluster.roles import single_process
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.events import Finished
from keras_distplug.core.ledger import Category
from keras_distplug.core.log import announce
from keras_distplug.core.reporting import report, time_spent
from keras_distplug.core.state import Completion
from keras_distplug.core.supervised import Phase, Supervised
from keras_distplug.data import contents
from keras_distplug.python_state import script_code
from keras_distplug.step.executions import Executions
from keras_distplug.storage import runs
from keras_distplug.storage.commit import Team, Writer
from keras_distplug.storage.export_file import Export, Format
from keras_distplug.storage.files import create_private, open_files
from keras_distplug.storage.retention import Retention
from keras_distplug.storage.store import CheckpointStore


class BackupAndRestore(RunKeeper):
    """Saves the training state, and resumes from it when the script is started again.

    Takes the arguments of `keras.callbacks.BackupAndRestore`. Differences:

    - A new checkpoint is written next to the earlier ones, and counts once it is complete on disk.
      Training resumes from the newest one whose checksums hold; a damaged one is quarantined and
      reported.
    - Weights, optimizers (with their learning rate), seed generators, epoch, step, `History` and
      the state of other callbacks are restored: the patience and the best weights of
      `EarlyStopping`, for example. Attributes of custom callbacks that change during training are
      saved; if a callback has `state_dict()` and `load_state_dict(state)`, those are used instead
      (numbers, text, arrays, lists and dicts of these). `CSVLogger` keeps its rows.
    - It runs after all other callbacks, whatever its place in the list, so that a checkpoint
      contains what they do at the end of an epoch.
    - Checkpoints are written in the background while training continues. Meanwhile, memory holds
      two copies of the values that change. Training ends once the last checkpoint is written.
    - Under `MultiWorkerMirroredStrategy`, every worker writes its share, and all workers resume
      from the same checkpoint. Any number of workers can resume from it.
    - A failed save is retried, then reported in a warning; the next one is made when it is due. Too
      many consecutive failures end training.
    - A directory that holds the run of another model, or of other data, is refused.
    - Training that ends with a non-finite loss is neither recorded as finished nor deleted.

    From a checkpoint made mid-epoch, `fit` continues with the next batch, and callbacks and the
    progress bar see that batch's own number. The data must come in the same order again; a warning
    names any input that doesn't. Keras calls `on_epoch_begin` of other callbacks again; their state
    is restored after that.

    Example:

    ```python
    callback = kd.BackupAndRestore(
        "runs/mnist",
        save_freq="auto",
        delete_checkpoint=False,
        retention=kd.Retention(keep_best=("val_loss", "min", 1)),
    )
    model.fit(x, y, epochs=10, callbacks=[callback])
    ```

    Args:
        backup_dir: Folder for the checkpoints of this training, shared by all workers: a path, or
            a URL (`s3://bucket/runs/mnist`, `gs://`, `az://`, `sftp://`, `memory://`).
        save_freq: `"epoch"`; an integer number of batches; a time, as a `datetime.timedelta` or as
            in `"30s"`, `"5min"`, `"1.5h"`; `"auto"`, which measures what a save costs and saves as
            often as `saving.max_overhead` permits; or `False` to save at the end of training only.
            Defaults to `"epoch"`.
        double_checkpoint: Keep one more of the newest. Defaults to `False`.
        delete_checkpoint: Delete the checkpoints when training has finished. Defaults to `True`.
            With `False`, the end is recorded: the same `fit` started again returns immediately with
            the stored `History` and weights; with more `epochs`, it continues training.
        saving: How much saves may cost, and what happens if one is late or fails, as a `Saving`.
            Defaults to `Saving()`.
        retention: Which checkpoints to keep, as a `Retention`. Defaults to `Retention()`, the two
            newest.
        resuming: What the script may have changed since the checkpoint, and what a new run starts
            from, as a `Resuming`. Defaults to `Resuming()`.
        local: Checkpoints on the workers' own machines, as `LocalCheckpoints`. Defaults to `None`.
        storage_options: Arguments for fsspec's file system for the store of `backup_dir`, such as
            `{"endpoint_url": "https://..."}`. Credentials are better left where the store's own
            tools look for them. Defaults to `None`.
        resume: `False` starts a new run next to the existing ones. Defaults to `True`.
        single: The fields of `Saving`, `Retention`, `Resuming` and `LocalCheckpoints` (`on_busy`,
            `keep_last`, `allow_data_change`, `local_tier`, ...) are also accepted as arguments.

    Raises:
        ConfigurationError: If an argument is invalid.
        OtherRunError: In `fit`, if the folder holds the run of another model, or of other data.
        SaveError: In `fit`, if too many consecutive saves, or the one at the end, have failed.
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: SaveFreq = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
        *,
        saving: Saving = SAVING,
        retention: Retention = RETENTION,
        resuming: Resuming = RESUMING,
        local: LocalCheckpoints | None = None,
        storage_options: Mapping[str, Any] | None = None,
        resume: bool = True,
        **single: Unpack[Single],
    ) -> None:
        super().__init__()
        if not backup_dir:
            raise ConfigurationError(f"Expected a checkpoint directory. Received: {backup_dir!r}")
        settings = Settings.of(saving, retention, resuming, local, single)
        self.backup_dir = backup_dir
        self.save_freq = save_freq
        self.double_checkpoint = double_checkpoint
        self.delete_checkpoint = delete_checkpoint
        self.saving = settings.saving
        self.retention = settings.retention
        self.local = settings.local
        self.resume = resume
        self.resuming = settings.resuming
        keep_last = self.retention.keep_last + bool(double_checkpoint)
        self._retention = replace(self.retention, keep_last=keep_last)
        self._local_place = None if self.local is None else self.local.open(self.saving)
        self._files = open_files(backup_dir, storage_options)
        is_near = self._files.traits.is_near
        self._cadence = get_cadence(save_freq, self.saving.max_overhead, is_near=is_near)
        self._storage_options = dict(storage_options or {})
        self._supervised = Supervised.from_env()
        self._run: runs.Run | None = None
        self._finished: Mapping[str, Any] | None = None
        self._trained_here = False
        self.is_shared_directory = False  # True if other models and data may have runs in it
        self._role = single_process()
        self._agreement = agreement.alone()
        self.hold = Hold(open_files(backup_dir, storage_options))  # heartbeats must not wait
        self._last_run: str | None = None  # finished by this callback
        self._saves: Saves | None = None
        self._all_saves: tuple[Saves, ...] = ()  # that, and the one of local checkpoints
        same_start.watch()  # before `fit` looks at the data

    def export(
        self,
        path: str | os.PathLike[str],
        step: int | str | None = None,
        format: Format | None = None,
        overwrite: bool = False,
    ) -> None:
        """Writes a checkpoint as one file for Keras or other tools.

        It can be called during `fit` (from another callback), after it, and before it if the
        directory holds a run. It waits for a save in progress. Training is not affected: the model
        loads the checkpoint's values, then gets its own back, which stay in memory meanwhile. With
        several workers, the chief writes the file, from a newly built model; on the others the call
        does nothing.

        Example:

        ```python
        callback.export("best.keras", step="best")
        callback.export("s3://bucket/mnist.safetensors", overwrite=True)
        ```

        Args:
            path: The file to write: a path, or a store's URL, which is opened with the callback's
                `storage_options`.
            step: The step of an existing checkpoint, its name (`"final-00000210"`), or `"best"` for
                the best one by `keep_best`. Defaults to the newest.
            format: `"keras"`, the whole model with its optimizer; `"weights.h5"`, for
                `load_weights`; or `"safetensors"`, the model's variables by name. Defaults to the
                extension of `path`.
            overwrite: `True` replaces an existing file. Defaults to `False`.

        Raises:
            ConfigurationError: If the arguments do not allow an export, or the file exists.
            NoCheckpointError: If the checkpoint does not exist. With `delete_checkpoint=True`, none
                exists once training has finished.
            CorruptCheckpointError: If the checkpoint is damaged. No file is written then.
        """
        keep_best = self.retention.keep_best
        exports.export(
            self._files,
            self._run.name if self._run else self._last_run,
            Export(
                os.fspath(path),
                step,
                best_by=keep_best and keep_best[:2],
                format=format,
                overwrite=overwrite,
                storage_options=self._storage_options,
            ),
            self._model,
        )

    def open_run(self, model: keras.Model, data: Mapping[str, str]) -> runs.Run:
        """Finds the run to resume, or starts a new one; all workers get the same run.

        Args:
            model: The model that will be trained, under its strategy.
            data: The fingerprints of its data, as in `data.contents`.
        """
        strategy = model.distribute_strategy
        saver.wait_for_all()
        self._role = agreement.get_role(strategy)
        opening.require_one_model(self._role, strategy)
        self._agreement = agreement.get_channel(self._role)
        name = None
        if self._role.is_chief:
            with self.hold.claimed():
                name = opening.run_of_model(
                    self._files,
                    model,
                    {} if self.resuming.allow_data_change else data,
                    resume=self.resume,
                    job=self._supervised.job if self._supervised else None,
                    is_shared=self.is_shared_directory,
                    world_size=self._role.world_size,
                ).name
        self._run = runs.read_run(self._files, self._agreement.broadcast("run", name))
        return self._run

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        trainer.adapt(model)
        self._others = move_to_end(self)
        require_made(self._others)
        if self.defers_to_other(self._others):
            given = [each for each in self._others if isinstance(each, BackupAndRestore)]
            same = [each for each in given if each.defers == self.defers]
            if same:
                what = "`defaults()` among the callbacks" if self.defers else "BackupAndRestore"
                raise ConfigurationError(
                    f"Expected one {what} per `fit`. Received: two, with backup directories "
                    f"{self._files.where()} and {same[-1]._files.where()}. Remove one of them."
                )
            return
        self._is_of_fit = epochs.get_loop() is not None
        self._spared = keras_callbacks.spare_files(self._others)

    def set_params(self, params: Mapping[str, Any]) -> None:
        super().set_params(params)
        self._executions = Executions(self.model, params.get("steps"))

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        for logger in self._spared:
            logger.append = False
        run = self._run = self._run or self.open_run(self.model, contents.fingerprint_fit())
        resuming_.require_own_list(made_in_fit=self._is_of_fit, is_chief=self._role.is_chief)
        self._saves = self._finished = None
        self._all_saves = ()
        self.hold.start(self.model, lambda: list(self._all_saves), self._forget_run)
        self._store = CheckpointStore(self._files, run.name, self._retention)
        self._trained_here = False
        self._local = None
        if self._local_place is not None:
            self._local = LocalTier(self._local_place[0], run.record.run_id)
        self._epochs = self.params.get("epochs", 1)
        self._state = FitState(
            self.model,
            [*self._others, *([self] if script_code.is_of_script(type(self)) else [])],
            self._role,
            self._agreement,
            run.record.seed,
            keeps_copies=self._local is not None,
        )
        made = exports.get_architecture(self.model) if self._role.is_chief else None
        with time_spent(Category.RESTORE):
            is_new = not resuming_.restore_newest(
                self._state, self._candidates(), self._prepare, self._continue_from
            )
        if is_new:
            resuming_.start_new_run(
                self.model, self._files, run, self._agreement, self.resuming, self._storage_options
            )
        exports.remember(self._files, run.name, made, self._state.step)
        for logger in self._spared:
            if logger not in self._state.restored:
                keras_callbacks.empty(logger)
        team = Team(self._role.rank, self._role.world_size, self._agreement)
        self._saves = self._saves_to(
            Writer(self._files, self._store, team, self.hold.ownership),
            self._cadence,
            self.saving.max_failed_saves,
        )
        self._all_saves = (self._saves,)
        if self._local is not None and self._local_place is not None:
            session = Writer.new_attempt() if self._role.is_chief else None
            session = self._agreement.broadcast("session", session)
            writer = self._local.writer(session, self._role.rank, agreement.alone())
            self._all_saves += (self._saves_to(writer, self._local_place[1], None),)
        self._state.build()
        self._report(Phase.FITTING)

    def _saves_to(
        self, writer: CheckpointWriter, cadence: Cadence, max_failed_saves: int | None
    ) -> Saves:
        step, wait = self._state.step, self.saving.on_busy == "wait"
        pace = Pace(cadence, step, time.monotonic(), wait_if_busy=wait)
        return Saves(
            writer,
            self._agreement,
            pace,
            is_chief=self._role.is_chief,
            max_failed_saves=max_failed_saves,
            on_saved=functools.partial(self._on_saved, self._run.name if self._run else ""),
            is_alone=self._role.world_size == 1,
        )

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._state.on_epoch_begin(epoch)
        self._stepped_s: float | None = None

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        # Keras before 3.11 gives `on_train_batch_end` an execution's first batch, not its last.
        self._batch = batch
        if self._executions.batches_each is None:
            self._executions.begin()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        trained = self._executions.batches_each or self._executions.end()
        self._state.on_train_batch_end(self._batch, trained)
        if not self._trained_here:
            self._trained_here = True
            self._report(Phase.TRAINING)
        before_s, self._stepped_s = self._stepped_s, time.monotonic()
        seconds = None if before_s is None else self._stepped_s - before_s
        step = self._state.step
        if due := [each for each in self._all_saves if each.stepped(step, seconds)]:
            with time_spent(Category.SAVE):
                for saves in due:
                    saves.look(step, lambda: self._state.take(logs), is_sound=is_finite(logs))
            self._stepped_s = time.monotonic()

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._run is None:
            self._executions.disable_counting()
        else:
            self._state.on_test_begin()

    def on_test_end(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._run is not None:
            self._state.on_test_end()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._state.on_epoch_end(epoch)
        last = self.model.stop_training or epoch + 1 == self._epochs
        best = best_epochs.is_among_best(self.retention, epoch, logs, self.model.history)
        if is_finite(logs):
            assert self._saves is not None
            step, take = self._state.step, functools.partial(self._state.take, logs)
            with time_spent(Category.SAVE):
                self._saves.on_epoch_end(step, take, is_last=last, is_best=best)
                for local in self._all_saves[1:]:
                    local.on_epoch_end(step, take)
        elif self._role.is_chief:
            announce(f"no checkpoint is saved after epoch {epoch + 1}: its loss is not finite")
        if epoch == 0 and self._role.is_chief:
            best_epochs.announce_unknown(self.retention, logs)

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        models.start_at_epoch(self.model, None)
        self._state.on_train_end()
        if self._finished is not None:
            # Keras and other callbacks have repeated their changes at the end of training.
            capture.put_back(self.model, self._finished)
        elif not is_finite(logs):
            self._finish_saves()
            self._run = None
            self.hold.release()
            return
        else:
            completion = Completion(
                epochs=self._epochs, stopped_early=bool(self.model.stop_training)
            )
            with time_spent(Category.SAVE):
                assert self._saves is not None
                self._saves.save(lambda: self._state.take(logs, completion))
                self._finish_saves()
        self._agreement.barrier("finished")
        self._report(Phase.COMPLETED)
        report(Finished(self._state.step, self._epochs, bool(self.model.stop_training)))
        if self._local is not None:
            self._local.delete_sessions()
        if self.delete_checkpoint:
            self.hold.delete(self._store)
        if self._run is not None:
            has_trained = self._finished is None
            opening.note_finished(self._files, self._run, has_trained, self.delete_checkpoint)
            self._last_run = None if self.delete_checkpoint else self._run.name
        self._run = None
        self.hold.release()

    def save_before_leaving(
        self, logs: Mapping[str, Any] | None, left_s: float | None
    ) -> int | None:
        step, is_sound = self._state.step, is_finite(logs)
        with time_spent(Category.SAVE):
            return save_all_in_time(
                reversed(self._all_saves),
                step,
                lambda: self._state.take(logs),
                left_s,
                is_sound=is_sound,
            )

    def roll_back(self) -> int | None:
        for saves in self._all_saves:
            saves.wait()
        self._agreement.barrier("roll back")
        return resuming_.roll_back(self._state, self._candidates())

    def keep_file(self, name: str, parts: Iterable[bytes | memoryview]) -> str:
        create_private(self._files, name, parts)
        return self._files.where(name)

    @property
    def context(self) -> RunContext:
        if self._run is None:
            raise RuntimeError("no run is in progress")
        return RunContext(self._files, self._run.name, self.backup_dir, self._storage_options)

    def _forget_run(self) -> None:
        """Forgets the run after a failed `fit`, so that the next one looks it up again."""
        self._run = None

    def _finish_saves(self) -> None:
        for saves in self._all_saves:
            saves.finish()

    def _candidates(self) -> Candidates:
        is_chief, epochs = self._role.is_chief, self._epochs
        return Candidates(
            self._store, self._local, self._agreement, is_chief=is_chief, epochs=epochs
        )

    def _prepare(self, found: Candidate) -> None:
        self._state.prepare(
            found.stored.manifest,
            self._files.where(self._run.name if self._run else ""),
            self.resuming,
            ends=found.ends,
        )

    def _continue_from(self, found: Candidate) -> None:
        manifest = found.stored.manifest
        if self._role.is_chief and self._run is not None:
            run, chief, epochs = self._run.name, self._role.name, self._epochs
            text = resuming_.resume_message(found, self._files, run, chief=chief, epochs=epochs)
            announce(text)
        if not found.ends:
            self._state.resume(manifest)
            return
        self._state.end(manifest, self._epochs)
        if manifest.completion is not None:
            self._finished = capture.capture(self.model)

    def _on_saved(self, run: str, step: int) -> None:
        """Called from a thread, and also after a failed `fit`."""
        if self._supervised is not None and self._role.is_chief:
            self._supervised.saved(self._files.where(run), step)

    def _report(self, phase: Phase) -> None:
        if self._supervised is not None:
            self._supervised.report(self._role.name, phase)
