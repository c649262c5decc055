"""The callback that keeps NaN out of the model and reports its origin."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import keras

from keras_distplug.backend.tensorflow import trainer
from keras_distplug.backend.tensorflow.runtime import callback_list
from keras_distplug.backend.tensorflow.runtime.workers import is_scheduled
from keras_distplug.callbacks.run_keeper import keeper_among
from keras_distplug.callbacks.watchdog import Watchdog, require_ints
from keras_distplug.cluster import agreement
from keras_distplug.core.errors import (
    AgreementError,
    CheckpointError,
    ConfigurationError,
    NonFiniteError,
)
from keras_distplug.core.events import Raised, RolledBack, UpdateLeftOut
from keras_distplug.core.log import announce
from keras_distplug.core.reporting import report
from keras_distplug.nonfinite.gate import Fault, NaNGate
from keras_distplug.nonfinite.incidents import Incidents
from keras_distplug.nonfinite.skipped_updates import ReplicaValues, SkippedUpdate, find_culprits
from keras_distplug.nonfinite.skips_on_workers import WorkerSkips
from keras_distplug.step.executions import Executions
from keras_distplug.step.instrumentation import StepInstrumentation

_ENDING_S = 60.0


class NaNWatchdog(Watchdog):
    """Skips non-finite updates of the model, and reports the replicas that they came from.

    A single NaN in the data of one replica makes all weights NaN on all replicas. With this
    callback, an update whose gradients or loss are not finite on any replica is not applied on any
    of them, which is decided within the step; metrics and the statistics of BatchNormalization do
    not change, either. Training continues as if that batch had not existed (except that random
    layers have advanced).

    After too many consecutive skips, the model is rolled back to the newest checkpoint, and
    training continues with the next batch: all batches since the checkpoint are skipped, as
    Chowdhery et al. (2022), "PaLM: Scaling Language Modeling with Pathways", section 5.1, do
    manually. If that does not help, training ends with an error.

    Example:

    ```python
    watchdog = kd.NaNWatchdog(max_skips=20, on_fault=lambda fault: print(fault.culprits))
    model.fit(ds, epochs=10, callbacks=[*kd.defaults("runs/mnist"), watchdog])
    ```

    - It is one of `defaults()`; adding your own instance replaces that one.
    - An update that a `LossScaleOptimizer` skips because of its scale is not a fault; a non-finite
      loss is one.
    - It covers updates through `optimizer.apply` or `apply_gradients`, including those of a custom
      `train_step`, and losses from `compute_loss`. It warns if the model uses neither.
    - Variables in custom layers that are not Keras variables are not restored.
    - Under ParameterServerStrategy, workers skip and count updates, and the chief requests the
      counts every second: the workers they came from are not known, `max_score` and
      `max_incidents` do not apply, and the number of consecutive skips is approximate, because
      steps overlap.
    - With `jit_compile=True`, XLA compiles a step to different instructions with this callback, so
      results may differ in the last bits from those without it. **Not verified on GPU.**
    - Without XLA, the last bits are the same on one CPU. Elsewhere, or with more than 256 MB of
      trained weights, they may differ under `SGD` if a gradient is a product, such as that of the
      scale of a `BatchNormalization`: TensorFlow reorders a product that only the optimizer uses.

    Args:
        max_skips: The maximum number of consecutive updates to skip. Defaults to 5.
        max_rollbacks: The maximum number of rollbacks to a checkpoint in one run. Requires a
            `BackupAndRestore`. Defaults to 1.
        max_score: A threshold for outliers: an update is also skipped if the robust z-score of its
            loss, or of the logarithm of its gradients' norm, is greater than this. The score uses
            the median and the median absolute deviation of the last 128 updates that were not
            skipped; 10 finds only extreme outliers. The first 32 updates, and those of a
            `LossScaleOptimizer`, are not checked. With several replicas, this adds an exchange of
            losses to every step. Defaults to `None`: no check.
        max_incidents: The maximum number of skipped batches that every worker diagnoses in one
            training. Such a batch is recomputed eagerly to find the first non-finite value (or to
            find that the fault was transient), and saved as a safetensors file in the folder
            `incidents` of the `BackupAndRestore`'s directory, for `keras-distplug replay`. These
            files contain your data; 0 disables them. Defaults to 8.
        on_fault: A function called with every `SkippedUpdate`, on every worker. Defaults to `None`.

    Raises:
        ConfigurationError: If an argument is invalid.
        NonFiniteError: In `fit`, if neither skipping nor rolling back helps.
    """

    def __init__(
        self,
        max_skips: int = 5,
        max_rollbacks: int = 1,
        *,
        max_score: float | None = None,
        max_incidents: int = 8,
        on_fault: Callable[[SkippedUpdate], None] | None = None,
    ) -> None:
        super().__init__()
        require_ints(
            0, max_skips=max_skips, max_rollbacks=max_rollbacks, max_incidents=max_incidents
        )
        self.max_skips = max_skips
        self.max_rollbacks = max_rollbacks
        self.max_incidents = max_incidents
        if max_score is not None and not max_score > 0:
            raise ConfigurationError(
                f"Expected `max_score` to be a number > 0, or None. Received: {max_score!r}"
            )
        self.max_score = max_score
        self.on_fault = on_fault
        self._consecutive = 0
        self._rollbacks = 0
        self._has_trained: bool | None = None  # in this epoch; None if not known yet
        self._trained = self._skipped = 0
        self._has_gate = False  # false if another instance does the work
        self._on_workers: WorkerSkips | None = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "in_a_row": self._consecutive,
            "rollbacks": self._rollbacks,
            "of_epoch": [self._has_trained, self._trained, self._skipped],
            "windows": self._gate.windows() if self._has_gate else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._consecutive, self._rollbacks = state["in_a_row"], state["rollbacks"]
        # Needed if training resumes at the end of an epoch, with no batch left in it.
        of_epoch = state.get("of_epoch", (None, 0, 0))
        self._has_trained, self._trained, self._skipped = of_epoch
        if self._has_gate:
            self._gate.set_windows(state["windows"])

    # Keras hooks, in the order in which they are called

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        trainer.adapt(model)
        # Must happen here, because Keras builds the step before `on_train_begin`.
        if self.defers_to_other(callback_list.move_to_front(self)):
            return
        self._instrumentation = StepInstrumentation.of(model)
        self._gate = self._instrumentation.shared(NaNGate)
        self._on_workers = None
        if is_scheduled(model.distribute_strategy):
            self._on_workers = WorkerSkips(model)
            return
        self._has_gate = True
        self._gate.set_up(self.max_score)
        self._instrumentation.use(self._gate)

    def set_params(self, params: Mapping[str, Any]) -> None:
        super().set_params(params)
        self._executions = Executions(self.model, params.get("steps"))

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._instrumentation.use_none()

    def on_predict_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._instrumentation.use_none()

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        others = callback_list.move_to_front(self)
        self._keeper = keeper_among(others)
        self._role = agreement.get_role(self.model.distribute_strategy)
        self._agreement = agreement.get_channel(self._role)
        self._replicas = (
            self.model.distribute_strategy.num_replicas_in_sync if self._on_workers is None else 0
        )
        self._where = f"{self._role.name} on {socket.gethostname()}"
        self._consecutive = self._rollbacks = 0
        self._gate.set_windows({})
        self._incidents = Incidents(self._instrumentation, self._keeper, self.max_incidents)
        self._is_new = self._on_workers is None
        if self._on_workers is not None:
            announce(
                "NaNWatchdog: under ParameterServerStrategy, workers train asynchronously. "
                "Non-finite updates are skipped and counted, but the worker that they came from is "
                "not reported, and `max_score` and `max_incidents` do not apply"
            )

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._epoch = epoch
        self._has_trained = None
        self._trained = self._skipped = 0

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._batch = batch
        self._updates: int | None = None
        if self._executions.batches_each == 1:
            return
        self._executions.begin()
        if self._on_workers is not None:
            return
        optimizer = self.model.optimizer
        # A `LossScaleOptimizer` does not count the updates that it skips itself.
        if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer | None):
            self._updates = int(optimizer.iterations.numpy())

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._on_workers is not None:
            self._trained += self._executions.end()
            self._poll_workers(self._on_workers, force=False)
            return
        if self._is_new:
            self._warn_if_unobservable()
        self._incidents.report_finished()
        faults = self._gate.faults()
        steps = self._group_by_step(faults) if faults else []
        if not steps:
            self._consecutive, self._has_trained = 0, True
            return
        self._handle_faults(steps, self._executions.end(), logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._on_workers is not None:
            self._poll_workers(self._on_workers, force=True)
            self._has_trained = self._skipped < self._trained if self._trained else None
        if self._has_trained is False and logs is not None:
            # Without any batch, metrics are 0, which would look like the best loss of all.
            logs.update(
                {name: math.nan for name in self.model.get_metrics_result() if name in logs}
            )

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        self._incidents.end()

    # Internals

    def _warn_if_unobservable(self) -> None:
        self._is_new = False
        if not self._gate.sees_updates and self._role.is_chief:
            warnings.warn(
                "NaNWatchdog cannot observe this model's updates: its `train_step` calls neither "
                "`optimizer.apply` nor `optimizer.apply_gradients` of an optimizer that the model "
                "was compiled with or has as an attribute. Non-finite updates are not skipped.",
                stacklevel=2,
            )

    def _poll_workers(self, workers: WorkerSkips, *, force: bool) -> None:
        counts = workers.poll(force=force)
        if not counts or not counts[0]:
            return
        new, in_a_row = counts
        self._skipped += new
        for later in reversed(range(new)):
            self._consecutive = max(1, in_a_row - later)
            self._report_skip(None, (), None)
        self._consecutive = in_a_row
        if self._consecutive > self.max_skips:
            self._escalate()
            workers.reset()

    def _handle_faults(
        self, steps: list[list[Fault]], trained: int, logs: dict[str, Any] | None
    ) -> None:
        self._has_trained = bool(self._has_trained)
        places = self._step_indices(steps)
        own = [self._diagnose_step(*each) for each in zip(steps, places, strict=True)]
        said = self._agreement.gather(
            "skipped updates", json.dumps([[asdict(each) for each in step] for step in own])
        )
        of_workers = [json.loads(text) for text in said]
        expected = 0
        for number, place in enumerate(places):
            if place is not None and place != expected:
                self._consecutive = 0
            self._consecutive += 1
            expected = self._consecutive if place is None else place + 1
            replicas = [
                ReplicaValues(**{**each, "variables": tuple(each["variables"])})
                for worker in of_workers
                for each in worker[number]
            ]
            first = steps[number][0]
            # Without a score, finite gradients of all replicas mean that only their sum overflowed.
            is_of_sum = first.score is None and all(each.is_finite for each in replicas)
            culprits = () if is_of_sum else find_culprits(replicas)
            self._save_finite(steps[number], place, culprits)
            self._report_skip(place, culprits, first)
        if places[-1] not in (None, trained - 1):
            self._consecutive, self._has_trained = 0, True
        if self._consecutive > self.max_skips:
            self._escalate()
        if self._has_trained and logs is not None:
            # The logs were computed before the metrics were restored.
            results = self.model.get_metrics_result()
            logs.update({name: results[name] for name in logs if name in results})

    def _diagnose_step(self, step: list[Fault], place: int | None) -> list[ReplicaValues]:
        """Returns the faults of this process's replicas in a step, with diagnoses."""
        looked_into = []
        # If an optimizer has several faulty updates in one step, the first says the most.
        firsts = {(each.replica, each.optimizer): each for each in reversed(step)}
        for fault in sorted(firsts.values(), key=lambda each: each.replica):
            looks = not fault.is_finite and self._incidents.accepts(fault)
            diagnosis = self._incidents.diagnosis(fault) if looks else None
            replica = ReplicaValues(
                fault.replica,
                self._where,
                fault.loss,
                fault.norm,
                fault.variables,
                origin=None if diagnosis is None else diagnosis.origin,
                is_transient=diagnosis is not None and diagnosis.is_finite,
            )
            looked_into.append(replica)
            if looks:
                self._save_batch(fault, place, replica)
        return looked_into

    def _save_finite(
        self, step: list[Fault], place: int | None, culprits: Sequence[ReplicaValues]
    ) -> None:
        """Saves the batches of finite faults, whose culprits are known only after all workers have
        reported."""
        named = {each.replica: each for each in culprits}
        for fault in step:
            if fault.is_finite and fault.replica in named and self._incidents.accepts(fault):
                self._save_batch(fault, place, named[fault.replica])

    def _save_batch(self, fault: Fault, place: int | None, replica: ReplicaValues) -> None:
        self._incidents.save(fault, self._epoch, self._batch + (place or 0), str(replica))

    def _group_by_step(self, faults: list[Fault]) -> list[list[Fault]]:
        """Groups faults by step, in the order of the steps."""
        if self.model.steps_per_execution == 1:
            return [faults] if faults else []
        steps: dict[int, list[Fault]] = {}
        before: dict[tuple[int, str], tuple[int, int]] = {}  # a fault's step and call
        for fault in faults:
            step, call = before.get((fault.replica, fault.optimizer), (-1, 0))
            step += fault.call <= call or step < 0
            before[fault.replica, fault.optimizer] = step, fault.call
            steps.setdefault(step, []).append(fault)
        return list(steps.values())

    def _step_indices(self, steps: list[list[Fault]]) -> list[int | None]:
        """Returns the indices of `steps` in their execution; None for one that is not known."""
        if self.model.steps_per_execution == 1:
            return [0]
        places: list[int | None] = []
        skipped = 0  # updates of the first faulty replica
        for first, *others in steps:
            calls = self._gate.calls[first.optimizer]
            is_counted = self._updates is not None and first.optimizer == "optimizer"
            tried = first.updates - (self._updates or 0) + skipped
            places.append(tried // calls if is_counted else None)
            mine = (first.replica, first.optimizer)
            skipped += 1 + sum((each.replica, each.optimizer) == mine for each in others)
        return places

    def _report_skip(
        self, place: int | None, culprits: tuple[ReplicaValues, ...], first: Fault | None
    ) -> None:
        fault = SkippedUpdate(
            self._epoch,
            None if place is None else self._batch + place,
            culprits,
            self._replicas,
            None if first is None else first.score,
            None if first is None else first.loss_score,
            self._consecutive,
        )
        if self._role.is_chief:
            report(_as_event(fault))
            announce(f"an update was skipped (consecutive skips: {self._consecutive}): {fault}")
        if self.on_fault is not None:
            self.on_fault(fault)

    def _escalate(self) -> None:
        skips, rollbacks = self._consecutive, self._rollbacks
        trouble = (
            f"{skips} consecutive update{'s' * (skips > 1)} skipped (non-finite values or outliers)"
        )
        if rollbacks >= self.max_rollbacks:
            again = f", even after {rollbacks} rollback{'s' * (rollbacks > 1)}" if rollbacks else ""
            raise self._stop_with_error(f"{trouble}{again}")
        if self._keeper is None:
            raise self._stop_with_error(
                f"{trouble}, and a rollback is not possible without a "
                "keras_distplug.BackupAndRestore among the callbacks"
            )
        try:
            step = self._keeper.roll_back()
        except CheckpointError as error:
            raise self._stop_with_error(f"{trouble}, and the rollback failed: {error}") from error
        if step is None:
            raise self._stop_with_error(
                f"{trouble}, and there is no checkpoint yet to roll back to"
            )
        self._consecutive = 0
        self._rollbacks += 1
        if self._role.is_chief:
            report(RolledBack(step, self._rollbacks, trouble))
            announce(
                f"{trouble}: the model was rolled back to step {step}. Training continues with the "
                "next batch; the batches since that step are not repeated (rollback "
                f"{self._rollbacks} of at most {self.max_rollbacks})"
            )

    def _stop_with_error(self, why: str) -> NonFiniteError:
        self._incidents.end()
        # A worker that exits may take down the service through which others receive the decision.
        with contextlib.suppress(AgreementError):
            self._agreement.barrier("end for NaN", within_s=_ENDING_S)
        report(Raised(f"{NonFiniteError.__name__}: {why}"))
        return NonFiniteError(f"{why}. {_REMEDY}")


def _as_event(fault: SkippedUpdate) -> UpdateLeftOut:
    return UpdateLeftOut(
        epoch=fault.epoch,
        batch=fault.batch,
        in_a_row=fault.in_a_row,
        replicas=tuple(each.replica for each in fault.culprits),
        where=tuple(dict.fromkeys(each.where for each in fault.culprits)),
        variable=next((each.variables[0] for each in fault.culprits if each.variables), None),
        origin=next((each.origin for each in fault.culprits if each.origin is not None), None),
        is_transient=any(each.is_transient for each in fault.culprits),
        score=fault.score,
        what=str(fault),
    )


_REMEDY = (
    "The lines above name the replicas and variables. Check the data of these batches; if training "
    "itself diverges, try a smaller learning rate, `clipnorm` or a warm-up."
)
