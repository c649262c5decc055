"""The state of a `fit` in progress: captured for a checkpoint, and restored from one."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_distplug.backend.tensorflow import trainer
from keras_distplug.backend.tensorflow.input import epochs
from keras_distplug.backend.tensorflow.parameter_server import scheduled
from keras_distplug.backend.tensorflow.replicas import replica_values, touched
from keras_distplug.backend.tensorflow.runtime import models
from keras_distplug.checkpoint import (
    callback_states,
    capture,
    changed_settings,
    compilation,
    external_variables,
    own_states,
    same_data,
    same_run,
)
from keras_distplug.checkpoint.candidates import Candidate
from keras_distplug.checkpoint.lost_logs import LostLogs
from keras_distplug.checkpoint.new_weights import NewWeights
from keras_distplug.checkpoint.progress_line import show_progress
from keras_distplug.checkpoint.settings import RESUMING, Resuming
from keras_distplug.cluster.channel import Channel
from keras_distplug.cluster.roles import Role
from keras_distplug.core.collector import collector_paused
from keras_distplug.core.errors import CheckpointError, CorruptCheckpointError
from keras_distplug.core.log import announce
from keras_distplug.core.state import Completion, Cursor, TrainState
from keras_distplug.data import progress
from keras_distplug.data.position import Positioned, is_own_part
from keras_distplug.python_state import json_values, random_states
from keras_distplug.storage.manifest import Manifest
from keras_distplug.storage.meter import Meter


class FitState:
    """The state of one `fit`, from its `on_train_begin` on.

    It counts the trained batches, so its methods named after Keras' hooks must be called in these,
    after all other callbacks.

    Args:
        model: The model in training.
        others: The other callbacks.
        role: This process's role.
        agreement: The channel between the workers.
        seed: Seed for data that would otherwise be shuffled in an irreproducible order.
        keeps_copies: True if every worker also keeps checkpoints for itself.
    """

    def __init__(
        self,
        model: keras.Model,
        others: Sequence[keras.callbacks.Callback],
        role: Role,
        agreement: Channel,
        seed: int,
        *,
        keeps_copies: bool = False,
    ) -> None:
        self._epoch = self._batch = self.step = 0  # parts of `cursor`
        self.restored: list[keras.callbacks.Callback] = []  # callbacks that got a state
        self._model = model
        self._others = others
        self._role = role
        self._agreement = agreement
        self._seed = seed
        self._keeps_copies = keeps_copies
        self._unbuilt = models.unbuilt_layers(model)
        self._compilation = compilation.Compilation(model)
        self._external = external_variables.ExternalVariables(model, others, warns=role.is_chief)
        touched.Touched.of(model).on_step_known = self._on_step_known
        self._progress = progress.track_fit(model, seed)
        if self._progress is not None:
            _ = self._progress.data.source.contents  # computed now: training may change them
            if role.world_size > 1 and not is_own_part(self._progress.data):
                same_data.use_chiefs_seeds(self._progress.data.source, agreement)
        self._validation: Positioned | None = None
        self._validated = 0  # passes over the validation data before this `fit`
        self._validated_read = 0  # passes of which a batch was read
        self._validated_with: Sequence[Any] = ()  # the data's variables after these passes
        self._drawn: Mapping[str, Any] | None = None  # random state before the first validation
        self._has_other_data = False
        self._allowed = RESUMING
        self._changes: Sequence[changed_settings.Change] = ()
        self._own_rate_until = -1  # step up to which checkpoints have another learning rate
        self._callbacks = callback_states.CallbackStates(
            others, model, is_alone=role.world_size == 1
        )
        self._arrays: Mapping[str, np.ndarray] = {}
        self._enter_epoch: Callable[[], None] | None = None
        self._leave_epoch: Callable[[], None] | None = None
        self._new_weights = NewWeights(model, is_chief=role.is_chief)
        self._lost_logs = LostLogs(is_chief=role.is_chief)
        self._lost_states: set[str] = set()  # names already reported
        for line in self._callbacks.unsound() if role.is_chief else ():
            announce(f"a callback cannot resume exactly after a restart: {line}")
        replica_values.stop_waiting(model)  # for variables that a failed `fit` did not make
        self._finish_own: Callable[[], None] = lambda: None

    def _on_step_known(self, step: str, stage: touched.Stage) -> None:
        if step == "train_step" and stage is touched.Stage.TRACED:
            self._compilation.note_trace()
            self._new_weights.report()
        self._external.on_step_known(stage)

    # Counting

    @property
    def cursor(self) -> Cursor:
        return Cursor(self._epoch, self._batch, self.step)

    @cursor.setter
    def cursor(self, cursor: Cursor) -> None:
        self._epoch, self._batch, self.step = cursor.epoch, cursor.batch, cursor.step

    def on_epoch_begin(self, epoch: int) -> None:
        models.start_at_epoch(self._model, None)
        if self._enter_epoch is None:
            self._epoch, self._batch = epoch, 0
        else:
            self._enter_epoch()
            self._enter_epoch = None
        if self._progress is not None:
            self._progress.on_epoch_begin()

    def on_train_batch_end(self, first: int, trained: int) -> None:
        """Must be called with the index of the first batch of the execution that has ended, and
        the number of batches that it trained."""
        self._batch = first + trained
        self.step += trained
        if self._progress is not None:
            self._progress.trained(trained)

    def _note_drawn(self) -> None:
        # Keras draws for a process's first validation; the earlier process did so at its own.
        self._drawn = random_states.capture()

    def on_test_begin(self) -> None:
        self._finish_own()  # variables that a test makes are not the epoch's
        if self._leave_epoch is not None:
            replica_values.reset_unbuilt(self._model)  # if no batch of the epoch remained
        if self._validation is None:
            self._validation = progress.track_validation(self._model, self._seed)
            if self._validation is not None and self._validated:
                if self._drawn is not None:
                    random_states.restore(self._drawn)
                progress.resume_validation(
                    self._validation,
                    self._validated,
                    self._validated_read,
                    self._validated_with,
                    is_inspected=trainer.inspects_a_batch(self._model),
                )
            self._drawn = None

    def on_test_end(self) -> None:
        if self._validation is not None:
            self._validation.note_read()

    def on_epoch_end(self, epoch: int) -> None:
        self._epoch, self._batch = epoch + 1, 0
        if self._leave_epoch is not None:
            replica_values.reset_unbuilt(self._model)
            self._leave_epoch()
            self._leave_epoch = None
        self._finish_own()

    def on_train_end(self) -> None:
        touched.Touched.of(self._model).on_step_known = None
        touched.Touched.of(self._model).around_trace = None
        self._external.end()

    # Capturing

    @collector_paused()
    def take(
        self, logs: Mapping[str, Any] | None, completion: Completion | None = None
    ) -> TrainState:
        """Returns the current state. All workers must call this together."""
        scheduled.settle(self._model)
        history = self._model.history
        self._lost_logs.report({**history.history, **(logs or {})})
        callbacks, arrays = self._callbacks.capture()
        self._report_lost_states()
        in_epoch = bool(self._batch)
        own = own_states.capture(
            self._model,
            self._agreement,
            self._role.world_size,
            in_epoch=in_epoch,
            random_for_all=self._keeps_copies,
        )
        return TrainState(
            cursor=self.cursor,
            arrays={
                **capture.capture(self._model),
                **self._external.capture(self._agreement, self._role.world_size),
                **own.arrays,
                **arrays,
            },
            history={name: json_values.encode(each) for name, each in history.history.items()},
            history_epochs=tuple(history.epoch),
            metrics=json_values.numbers(logs or {}),
            other_logs=json_values.others(logs or {}),
            data=self._data_position(in_epoch),
            stop_training=bool(self._model.stop_training),
            completion=completion,
            how_built={
                **capture.how_built(self._model, self._unbuilt, self._external.trainable()),
                **self._compilation.take(),
                "made_of": same_run.describe_model(self._model),
            },
            callbacks=callbacks,
            random=own.random,
        )

    def _report_lost_states(self) -> None:
        new = [each for each in self._callbacks.lost if each not in self._lost_states]
        self._lost_states.update(new)
        if new and self._role.is_chief:
            announce(
                f"{', '.join(new)} could not be saved or restored, so a restart continues without "
                "this state. If it belongs to a callback, return it from `state_dict()` as "
                "numbers, text, arrays, or lists, tuples, sets and dicts of these, and accept it "
                "in `load_state_dict(state)`"
            )

    def _data_position(self, in_epoch: bool) -> dict[str, Any]:
        if self._progress is None:
            return {}
        validated, variables = self._validated, self._validated_with
        validated_read = self._validated_read
        if self._validation is not None:
            validated, validated_read = self._validation.passes, self._validation.read
            variables = self._validation.variables(in_pass=False)
        return {
            "train": self._progress.position(in_epoch=in_epoch),
            "validation": validated,
            "validation_read": validated_read,
            "validation_variables": list(variables),
            "fingerprint": self._progress.data.source.fingerprint(),
        }

    # Restoring

    def prepare(self, manifest: Manifest, where: str, allowed: Resuming, *, ends: bool) -> None:
        """Makes the variables for which the checkpoint has values.

        Args:
            manifest: The checkpoint's manifest.
            where: The run's location, for errors.
            allowed: Which changes of the script are allowed.
            ends: True if the run ends there, and reads no more data.

        Raises:
            OtherRunError: If it is the run of another model, or of other data.
        """
        capture.build(self._model, manifest.how_built)
        self._restore_compilation(manifest, where)
        same_run.require_model(manifest, where, self._model, self._compilation.matches_script)
        self._allowed, self._rate = allowed, models.learning_rate(self._model)
        self._changes = self._compilation.changes(manifest.how_built)
        if not ends:
            changed_settings.require_allowed(
                self._changes, manifest.cursor, where, other_loss=allowed.allow_loss_change
            )
        elif not allowed.allow_loss_change:
            same = same_data.has_same_size(manifest, self._progress, self._role.world_size)
            changed_settings.require_same_training(
                self._changes, manifest.history, where, is_same_size=same
            )
        self._has_other_data = False
        if self._progress is None or "fingerprint" not in manifest.data:
            return
        compared = same_data.compare(
            manifest,
            self._progress.data.source,
            where,
            allowed,
            self._agreement,
            is_chief=self._role.is_chief,
            ends=ends,
        )
        self._has_other_data = compared.is_other
        if compared.has_other_seeds:
            self._use_seeds(compared.seeds)
        if compared.has_other_order:
            announce(same_data.OTHER_ORDER)

    def _use_seeds(self, seeds: str | None) -> None:
        assert self._progress is not None
        is_used = seeds is not None and self._progress.data.source.use_seeds(seeds)
        if self._role.is_chief:
            announce(same_data.OLD_SEEDS if is_used else same_data.NEW_SEEDS)

    def read(self, found: Candidate) -> CheckpointError | None:
        """Reads the values into the model and the callbacks. If any worker fails, returns the error
        on all workers, and every model keeps its values."""
        manifest = found.stored.manifest
        damage = self._read_values(found)
        if damage is None:
            self._restore_external(manifest)
            continues = manifest.stop_training and not found.ends and not manifest.cursor.batch
            self.restored = self._restore_callbacks(manifest, is_anew=continues)
        return damage

    def roll_back(self, found: Candidate) -> CheckpointError | None:
        """Does the same as `read` while training continues with the next batch. Metrics continue
        from those of the checkpoint if it is from the same epoch."""
        scheduled.settle(self._model)
        damage = self._read_values(found)
        if damage is None:
            there = found.stored.manifest.cursor
            self._restore_external(found.stored.manifest)
            if there.step <= self._own_rate_until:
                models.set_learning_rate(self._model, self._rate)
            self._restore_own(in_epoch=bool(there.batch))
            if there.epoch != self._epoch or not there.batch:
                self._model.reset_metrics()
        return damage

    def _read_values(self, found: Candidate) -> CheckpointError | None:
        before = capture.capture(self._model)
        stored, manifest = found.stored, found.stored.manifest
        failure, message, meter = None, None, Meter()
        with show_progress(f"reading {stored.name}", meter, is_shown=self._role.is_chief):
            try:
                values = stored.values(capture.allocate, meter)
                keys = [spec.key for spec in manifest.variables]
                self._arrays = capture.restore(self._model, keys, values)
            except CheckpointError as error:
                capture.put_back(self._model, before)
                failure = error
                who = f"{self._role.name}: " if self._role.world_size > 1 else ""
                message = json.dumps([isinstance(error, CorruptCheckpointError), f"{who}{error}"])
            first = self._agreement.first_error("restored", message)
        if first is None:
            return None
        if failure is None:
            capture.put_back(self._model, before)
        is_damage, message = json.loads(first)
        shared_error = CorruptCheckpointError(message) if is_damage else CheckpointError(message)
        shared_error.__cause__ = failure
        return shared_error

    def resume(self, manifest: Manifest) -> None:
        """Lets `fit` continue from the checkpoint's position."""
        self._restore_history(manifest)
        self._settle_changes(ends=False)
        changed = self._compilation.fit_optimizer(manifest.how_built)
        if changed is not None and self._role.is_chief:
            announce(f"the set of trained variables has changed since the checkpoint: {changed}")
        models.start_at_epoch(self._model, manifest.cursor.epoch)
        cursor, place = manifest.cursor, manifest.data.get("train")
        self._validated = manifest.data.get("validation", 0)
        self._validated_read = manifest.data.get("validation_read", 0)
        self._validated_with = manifest.data.get("validation_variables", ())
        if self._validated:
            epochs.call_before_validation(self._model, self._note_drawn)
        if self._progress is None or place is None or self._has_other_data:
            if cursor.batch and self._role.is_chief:
                how = (
                    "the epoch starts again from its first batch, because the data has changed"
                    if self._has_other_data
                    else "the batches before it are not skipped, because the position in the data "
                    "is not known (training does not use Keras' `fit`, or the data was already "
                    "distributed)"
                )
                announce(
                    f"the checkpoint was saved after batch {cursor.batch} of epoch "
                    f"{cursor.epoch + 1}; {how}"
                )
        elif cursor.batch:
            self._resume_epoch(manifest, self._progress, place)
        else:
            self._progress.seek(place, 0)
            self._restore_own(in_epoch=False)
            self._restore_random(manifest)

    def build(self) -> None:
        """Creates the first step's variables in advance, if that saves a second trace."""
        if self._progress is None or not models.is_traced_twice(self._model):
            return
        with contextlib.suppress(Exception):  # the first step raises a better error
            capture.build_optimizer(self._model)
            replica_values.build(self._model, self._progress.data.element_spec)

    def end(self, manifest: Manifest, epochs: int) -> None:
        """Lets `fit` return immediately, in the final state of the checkpoint's run."""
        self._restore_history(manifest)
        self._settle_changes(ends=True)
        if self._progress is not None and "train" in manifest.data:
            self._progress.note_end(manifest.data["train"])
        self._restore_random(manifest, ends=True)  # the script may draw before its next `fit`
        models.start_at_epoch(self._model, epochs)

    def _settle_changes(self, *, ends: bool) -> None:
        """Reports the script's changes, and sets its learning rate if the user asked for that."""
        rate = models.learning_rate(self._model)
        if (
            not self._allowed.restore_learning_rate
            and not ends
            and any(c.is_rate for c in self._changes)
        ):
            models.set_learning_rate(self._model, self._rate)
            self._own_rate_until, rate = self.step, None
        for line in changed_settings.messages(self._changes, rate, ends=ends):
            if self._role.is_chief:
                announce(line)

    def _restore_history(self, manifest: Manifest) -> None:
        self.cursor = manifest.cursor
        history = self._model.history
        history.history = {
            name: json_values.decode(each) for name, each in manifest.history.items()
        }
        history.epoch = list(manifest.history_epochs)

    def _resume_epoch(
        self, manifest: Manifest, following: progress.Progress, place: Mapping[str, Any]
    ) -> None:
        batches = math.inf if manifest.stop_training else manifest.cursor.batch
        batch = following.seek(place, batches)
        if batch != batches:
            self._batch = int(batch)
        before, now = place["batch_size"], following.data.source.batch_size
        if before != now and batch != math.inf and self._role.is_chief:
            announce(
                f"the global batch size has changed from {before} to {now}; the epoch continues "
                f"with the first sample that has not been trained on yet, in batch {int(batch) + 1}"
            )
        trained = capture.capture(self._model)

        def enter() -> None:
            # Other callbacks have run their `on_epoch_begin` for this epoch again.
            self._restore_compilation(manifest, "this directory")
            capture.put_back(self._model, trained)
            self._restore_external(manifest)
            self._restore_callbacks(manifest)
            is_same = not any(each.changes_logs for each in self._changes)  # don't mix two losses
            self._restore_own(in_epoch=True, with_metrics=is_same)
            if not is_same:
                self._model.reset_metrics()
            self._restore_random(manifest)
            self._model.stop_training = manifest.stop_training
            logs = {**manifest.metrics, **json_values.decode(manifest.other_logs)}
            self._leave_epoch = epochs.begin_with_logs(self._model, logs)

        self._enter_epoch = enter

    def _restore_compilation(self, manifest: Manifest, where: str) -> None:
        self._compilation.reapply(manifest.how_built, where)
        capture.build_optimizers(self._model, manifest.how_built, self._external.find)

    def _restore_external(self, manifest: Manifest) -> None:
        self._external.restore(self._arrays, self._role.rank, self._role.world_size)
        self._restore_draws(manifest)

    def _restore_own(self, *, in_epoch: bool, with_metrics: bool = True) -> None:
        own = {k: v for k, v in self._arrays.items() if k.startswith(own_states.PREFIX)}
        self._arrays = {}  # may hold best weights, as large as the model
        self._finish_own = own_states.restore(
            self._model, own, self._role, in_epoch=in_epoch, with_metrics=with_metrics
        )

    def _restore_callbacks(
        self, manifest: Manifest, *, is_anew: bool = False
    ) -> list[keras.callbacks.Callback]:
        return self._callbacks.restore(
            manifest.callbacks,
            self._arrays,
            epoch=manifest.cursor.epoch,
            is_anew=is_anew,
        )

    def _restore_random(self, manifest: Manifest, *, ends: bool = False) -> None:
        known = self._role.rank < len(manifest.random)
        if known and (ends or (self._progress is not None and not self._progress.draws_again)):
            random_states.restore(manifest.random[self._role.rank])
            self._restore_draws(manifest)  # setting a seed has restarted them

    def _restore_draws(self, manifest: Manifest) -> None:
        if self._role.rank < len(manifest.random):
            draws = manifest.random[self._role.rank].get(own_states.DRAWS, {})
            touched.Touched.of(self._model).draws.continue_streams(draws)
