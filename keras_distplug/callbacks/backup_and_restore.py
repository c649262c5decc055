"""A drop-in for `keras.callbacks.BackupAndRestore` that several workers may share."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Mapping
from typing import Any, Literal

import keras
import numpy as np

from keras_distplug.cluster import agreement
from keras_distplug.cluster.roles import single_process
from keras_distplug.compat import model as compat_model
from keras_distplug.compat import trainer
from keras_distplug.compat.callback_list import move_to_end
from keras_distplug.core.errors import (
    ConfigurationError,
    CorruptCheckpointError,
    OtherRunError,
)
from keras_distplug.core.log import announce
from keras_distplug.core.manifest import first_difference
from keras_distplug.core.protocols import Agreement, Resumable
from keras_distplug.core.state import Completion, Cursor, TrainState
from keras_distplug.core.supervised import Phase, Supervised
from keras_distplug.storage import store as storage
from keras_distplug.storage.files import open_files
from keras_distplug.training import capture


class BackupAndRestore(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves the state of training, and takes it up again when the script is started again.

    Takes the arguments of `keras.callbacks.BackupAndRestore`. It differs in that

    - a checkpoint is written beside the earlier ones and counts once it is complete on disk; the
      newest whose checksums hold is taken, and a damaged one is set aside and named;
    - weights, optimizers (with their learning rate), seed generators, epoch, step and `History`
      come back;
    - it acts after all other callbacks, wherever it stands among them, so that what they do at the
      end of an epoch is in the checkpoint;
    - under `MultiWorkerMirroredStrategy` the chief writes and all workers take up the same one;
    - a directory that holds another model's run is refused;
    - training that ends by a non-finite loss is neither recorded as finished nor deleted.

    A checkpoint from the middle of an epoch (`save_freq` an integer) is taken up at the beginning
    of that epoch, as in Keras.

    Example:

    ```python
    callback = keras_distplug.BackupAndRestore("runs/mnist", delete_checkpoint=False)
    model.fit(x, y, epochs=10, callbacks=[callback])
    ```

    Args:
        backup_dir: Folder for the checkpoints of this training. Shared by all workers.
        save_freq: `"epoch"`, an integer number of batches, or `False` to save at the end of
            training only. Defaults to `"epoch"`.
        double_checkpoint: Keep three checkpoints instead of two. Defaults to `False`.
        delete_checkpoint: Delete the checkpoints once training has reached its end. Defaults to
            `True`. With `False` the end is recorded: the same `fit` started again returns at once
            with the stored `History` and weights, one with more `epochs` goes on.
        resume: `False` begins a new run beside what the folder holds. Defaults to `True`.

    Raises:
        ConfigurationError: For an argument that is not usable.
        OtherRunError: In `fit`, if the folder holds the run of another model.
        SaveError: In `fit`, if a checkpoint could not be written.
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: Literal["epoch", False] | int = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
        *,
        resume: bool = True,
    ) -> None:
        super().__init__()
        if not backup_dir:
            raise ConfigurationError(f"`backup_dir` is empty. Received: {backup_dir!r}")
        whole = isinstance(save_freq, int) and not isinstance(save_freq, bool) and save_freq > 0
        if save_freq != "epoch" and save_freq is not False and not whole:
            raise ConfigurationError(
                'Expected `save_freq` to be "epoch", False, or a number of batches >= 1. '
                f"Received: save_freq={save_freq!r}"
            )
        self.backup_dir = backup_dir
        self.save_freq = save_freq
        self.double_checkpoint = double_checkpoint
        self.delete_checkpoint = delete_checkpoint
        self.resume = resume
        self.data: Resumable | None = None
        self._files = open_files(backup_dir)
        self._supervised = Supervised.from_env()
        self._run: storage.Run | None = None
        self._finished: storage.Stored | None = None
        self._cursor = Cursor(epoch=0, batch=0, step=0)
        self._last_save_step = 0
        self._trained_here = False
        self._role = single_process()
        self._agreement: Agreement = agreement.Alone()

    def open_run(self, strategy: Any) -> storage.Run:
        """Finds the run to go on with, or begins one; all workers get the same.

        Args:
            strategy: The `tf.distribute.Strategy` of the model that will be trained.
        """
        self._role = agreement.role_under(strategy)
        self._agreement = agreement.among(self._role)
        name = None
        if self._role.is_chief:
            name = self._find_or_begin_run().name
        self._run = storage.read_run(self._files, self._agreement.from_chief("run", name))
        return self._run

    def _find_or_begin_run(self) -> storage.Run:
        job = self._supervised.job if self._supervised else None
        try:
            newest = storage.newest_run(self._files)
        except CorruptCheckpointError:
            if self.resume:
                raise
            newest = None
        # A supervisor starts the same script again: `resume=False` is meant for its first start.
        own = newest is not None and job is not None and newest.record.job == job
        if newest is not None and (self.resume or own):
            return newest
        return storage.begin_run(self._files, job=job, seed=random.randrange(2**31))

    # Keras' hooks, in the order in which they come

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        trainer.adapt(model)
        move_to_end(self)

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        run = self._run = self._run or self.open_run(self.model.distribute_strategy)
        self._store = storage.CheckpointStore(
            self._files,
            run.name,
            keep_last=3 if self.double_checkpoint else 2,
            world_size=self._role.world_size,
        )
        self._finished = None
        self._trained_here = False
        self._cursor = Cursor(epoch=0, batch=0, step=0)
        self._epochs = self.params.get("epochs", 1)
        stored, ends = self._agree_on_checkpoint()
        if stored is None:
            if self._role.is_chief:
                announce(f"new run {self._where(run.name)}")
        else:
            self._take_up(stored, run, ends)
        self._last_save_step = self._cursor.step
        self._report(Phase.FITTING)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        compat_model.start_at_epoch(self.model, None)
        self._cursor = Cursor(epoch=epoch, batch=0, step=self._cursor.step)

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        # Keras before 3.11 gives `on_train_batch_end` an execution's first batch, not its last.
        self._batch = batch

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        done = self._batch + self.model.steps_per_execution
        if (steps := self.params.get("steps")) is not None:
            done = min(done, steps)
        self._cursor = Cursor(
            epoch=self._cursor.epoch,
            batch=done,
            step=self._cursor.step + done - self._batch,
        )
        if not self._trained_here:
            self._trained_here = True
            self._report(Phase.TRAINING)
        if isinstance(self.save_freq, int) and self.save_freq:
            since = self._cursor.step - self._last_save_step
            if since >= self.save_freq and _is_finite(logs):
                self._save(self._cursor)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._cursor = Cursor(epoch=epoch + 1, batch=0, step=self._cursor.step)
        last = self.model.stop_training or epoch + 1 == self._epochs
        if not _is_finite(logs):
            if self._role.is_chief:
                announce(
                    f"epoch {epoch + 1} ended with a loss that is not finite; no checkpoint is "
                    "made of it"
                )
        elif self.save_freq == "epoch" or (self.save_freq is not False and last):
            self._save(self._cursor)

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        compat_model.start_at_epoch(self.model, None)
        if self._finished is not None:
            # Keras and other callbacks have done to it once more what was done to it already.
            capture.restore(self.model, self._finished.arrays)
        elif not _is_finite(logs):
            self._run = None
            return
        else:
            self._save(
                self._cursor,
                Completion(
                    epochs=self._epochs,
                    stopped_early=bool(self.model.stop_training),
                ),
            )
        self._agreement.barrier("finished")
        self._report(Phase.COMPLETED)
        if self.delete_checkpoint and self._role.is_chief:
            self._store.delete_run()
        if self._run is not None:
            _finished_here.add(self._run.record.run_id)
        self._run = None

    # How

    def _agree_on_checkpoint(self) -> tuple[storage.Stored | None, bool]:
        """The checkpoint to take up, and whether the run ends there; the same on all workers."""
        stored, word = None, None
        if self._role.is_chief:
            stored, ends = self._newest()
            word = json.dumps([stored.name if stored else None, ends])
        name, ends = json.loads(self._agreement.from_chief("checkpoint", word))
        if name is not None and stored is None:
            stored = self._store.read(name)
        return stored, ends

    def _newest(self) -> tuple[storage.Stored | None, bool]:
        step, final = self._store.newest("step"), self._store.newest("final")
        if final is None:
            # Stopped, and killed before that could be recorded.
            return step, step is not None and step.manifest.stop_training
        if _completion(final).epochs >= self._epochs:
            return final, True
        # At the same step, the one under way: callbacks may have changed the model for its end.
        if step is not None and step.manifest.cursor.step >= final.manifest.cursor.step:
            return step, False
        return final, False

    def _take_up(self, stored: storage.Stored, run: storage.Run, ends: bool) -> None:
        manifest = stored.manifest
        if ends and run.record.run_id in _finished_here:
            raise ConfigurationError(
                f"This process has finished the run in {self._where(run.name)} already, so `fit` "
                "would train nothing. Give each training a directory of its own, more epochs to go "
                "on, or resume=False to begin a new run."
            )
        capture.build(self.model, manifest.how_built)
        self._refuse_other_run(stored, run)
        capture.restore(self.model, stored.arrays)
        self._cursor = manifest.cursor
        history = self.model.history
        history.history = {name: list(values) for name, values in manifest.history.items()}
        history.epoch = list(manifest.history_epochs)
        if ends and manifest.completion is not None:
            self._finished = stored
        compat_model.start_at_epoch(self.model, self._epochs if ends else manifest.cursor.epoch)
        if self.data is not None and manifest.data:
            self.data.seek(manifest.data)
        if self._role.is_chief:
            self._tell(stored, run)

    def _tell(self, stored: storage.Stored, run: storage.Run) -> None:
        cursor = stored.manifest.cursor
        where = f"{self._where(run.name)}, checkpoint {stored.name}"
        if self._finished is not None:
            announce(
                f"{where}: this run is finished ({cursor.epoch} epochs). Its History and weights "
                "are returned; give more epochs to go on, or resume=False to begin a new run"
            )
        else:
            announce(
                f"{where}: resuming at epoch {cursor.epoch + 1}/{self._epochs}, step {cursor.step}"
            )
            if cursor.batch:
                announce(
                    f"the checkpoint was made after batch {cursor.batch} of that epoch; the epoch "
                    "begins again from its first batch"
                )

    def _refuse_other_run(self, stored: storage.Stored, run: storage.Run) -> None:
        difference = first_difference(
            capture.specs_of_model(stored.manifest.variables), capture.specs_of(self.model)
        )
        if difference is not None:
            raise OtherRunError(
                f"{self._where(run.name)} holds the run of another model. The first difference: "
                f"{difference}. Give this model a directory of its own, or resume=False to begin a "
                "new run beside the old one; nothing was changed."
            )

    def _save(self, cursor: Cursor, completion: Completion | None = None) -> None:
        self._last_save_step = cursor.step
        if not self._role.is_chief:
            return
        history = self.model.history
        self._store.save(
            TrainState(
                cursor=cursor,
                arrays=capture.capture(self.model),
                history={name: _plain(values) for name, values in history.history.items()},
                history_epochs=tuple(history.epoch),
                data=self.data.position() if self.data is not None else {},
                stop_training=bool(self.model.stop_training),
                completion=completion,
                how_built=capture.how_built(self.model),
            )
        )

    def _where(self, run: str) -> str:
        return os.path.join(os.fspath(self.backup_dir), run)

    def _report(self, phase: Phase) -> None:
        if self._supervised is not None:
            self._supervised.report(self._role.name, phase)


_finished_here: set[str] = set()  # ids of runs that this process has brought to their end


def _completion(stored: storage.Stored) -> Completion:
    completion: Completion | None = stored.manifest.completion
    if completion is None:
        raise CorruptCheckpointError(
            f"{stored.name} is kept as the record of a finished run, but does not say how it ended."
        )
    return completion


def _is_finite(logs: Mapping[str, Any] | None) -> bool:
    loss = (logs or {}).get("loss")
    return loss is None or math.isfinite(float(loss))


def _plain(values: list[Any]) -> list[Any]:
    """JSON takes Python's numbers only."""
    return [np.asarray(value).tolist() for value in values]
