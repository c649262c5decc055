"""What each replica and each worker has in a step, and how far they are apart."""

from __future__ import annotations

import json
import os
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import keras

from keras_distplug.backend.tensorflow import trainer
from keras_distplug.backend.tensorflow.runtime import callback_list
from keras_distplug.backend.tensorflow.runtime.workers import is_scheduled, replicas_here
from keras_distplug.callbacks.watchdog import Watchdog, require_ints
from keras_distplug.cluster import agreement
from keras_distplug.cluster.listeners import Reports
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.events import Diverged
from keras_distplug.core.log import announce
from keras_distplug.core.reporting import report
from keras_distplug.replicas.checksums import checksums
from keras_distplug.replicas.divergence import Divergence, divergence
from keras_distplug.replicas.replica_curves import (
    OF_REPLICAS,
    OF_WORKERS,
    SPREAD,
    ReplicaCurves,
    values_of,
)
from keras_distplug.step.step_reports import StepReport, as_text, from_text, merged, with_same_data
from keras_distplug.step.step_windows import OwnWindows, StepWindows, tell_what_is_lost
from keras_distplug.storage.files import Files, local_path, open_files

_LAST_SECS = 5.0  # for what is under way at the end

_NAMES = [f"{what}_{how}" for what in (*OF_REPLICAS, *OF_WORKERS) for how in SPREAD]


class ReplicaMetrics(Watchdog):
    """Shows what each replica and each worker has in a step, and how far they are apart.

    What `fit` logs is of all replicas together. Here each one tells of its own, before gradients
    are summed, in windows of steps that the chief brings together in a thread:

    - of replicas, `loss`, `gradient_norm`, `samples_per_s`, `compute_ms` (from their data to their
      gradients) and `sync_ms` (from there to the sum of all: waiting for the others, and for the
      sum);
    - of workers, `step_ms`, `input_ms` (waiting for their data) and `memory_mb` (of the process).

    It compares the replicas' weights, too: those that are no longer the same train different
    models, which nothing else tells.

    Example:

    ```python
    metrics = kd.ReplicaMetrics("runs/mnist/logs", logs=["loss_spread", "step_ms_max"])
    model.fit(ds, epochs=10, callbacks=[*kd.defaults("runs/mnist"), metrics])
    ```

    - In TensorBoard there is one chart for each, `distplug/loss` and so on, with a curve for each
      replica or worker, and the `min`, `median`, `p95` and `max` of all. With more than 64 of
      either there are these four only. Curves go on where a checkpoint was taken up.
    - Of a step that does not take its loss from `compute_loss`, there is none here; nor is there
      anything of replicas where the step is compiled by XLA or calls neither `optimizer.apply` nor
      `optimizer.apply_gradients`, which is warned of. Of a model with several optimizers, the
      first one that is asked in a step counts.
    - `sync_ms` is known of the first replica only of central storage, and `input_ms` of one process
      not with `steps_per_execution` above 1.
    - Not a bit of the training changes. **Not verified on GPU**, where a gradient is there for
      Python when it has been copied.

    Args:
        log_dir: A folder for TensorBoard, or a URL, which the chief alone writes to. In a store,
            whole files come each minute, and at the end. Defaults to `None`: none is written.
        every_steps: How many steps are a window. Times are the median of these, other values the
            mean. Defaults to 10.
        storage_options: As in `BackupAndRestore`, for `log_dir`.
        logs: What to add to the logs of each epoch, and so to `History`, on all workers:
            `"<what>_<how>"` of the names above and `min`, `median`, `p95`, `max` or `spread`
            (largest minus smallest), such as `"loss_spread"`, which comes as `replica/loss_spread`.
            Behind a restart in mid-epoch it is of the batches since then. Defaults to none.
        check_every_steps: The weights, and what optimizers keep, of all replicas are compared
            each so many steps, by checksums made in a thread, until which there are two copies in
            memory of what changes; `None` never does. Defaults to 1000.
        fingerprints: Whether to look for replicas that are given the same data as others, step for
            step, which takes a checksum of each batch. Defaults to `False`.
        on_divergence: Called with each `Divergence`, on the chief, behind a batch. Defaults to
            `None`.

    Raises:
        ConfigurationError: For an argument that is not usable.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        every_steps: int = 10,
        *,
        storage_options: Mapping[str, Any] | None = None,
        logs: Sequence[str] = (),
        check_every_steps: int | None = 1000,
        fingerprints: bool = False,
        on_divergence: Callable[[Divergence], None] | None = None,
    ) -> None:
        super().__init__()
        require_ints(1, every_steps=every_steps)
        if check_every_steps is not None:
            require_ints(1, check_every_steps=check_every_steps)
        if log_dir is None and storage_options:
            raise ConfigurationError("`storage_options` is for `log_dir`, which is not given.")
        if isinstance(logs, str) or any(name not in _NAMES for name in logs):
            raise ConfigurationError(
                f"Expected `logs` to be a list of names among {', '.join(_NAMES)}. "
                f"Received: {logs!r}"
            )
        self.log_dir = log_dir
        self._storage_options = dict(storage_options or {})
        self._files = None if log_dir is None else open_files(log_dir, storage_options)
        self.every_steps = every_steps
        self.logs = tuple(logs)
        self.check_every_steps = check_every_steps
        self.fingerprints = fingerprints
        self.on_divergence = on_divergence
        self._windows: StepWindows | None = None  # not where another one does the work
        self._checks: Reports | None = None

    # Keras' hooks, in the order in which they come

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        trainer.adapt(model)
        if self._windows is not None:  # an error has ended the last `fit`
            self._windows.close()
        self._windows = None
        # Here, because Keras makes the step before `on_train_begin`.
        if self.stands_aside(callback_list.move_to_front(self)):
            return
        if is_scheduled(model.distribute_strategy):
            announce(
                "ReplicaMetrics: there are no replicas that take a step together, so nothing is "
                "compared or written"
            )
            return
        own = OwnWindows(model, syncs=True, readings=True, fingerprints=self.fingerprints)
        self._windows = StepWindows(own, self.every_steps)

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._windows is not None:
            self._windows.own.unwant()

    def on_predict_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self.on_test_begin(logs)

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._windows is None:
            return
        self._is_new = True
        self._found: deque[Divergence | str] = deque()
        self._is_apart = False
        self._same_data: set[tuple[int, ...]] = set()
        self._unchecked = 0
        role = self._windows.own.role
        self._agreement = agreement.among(role)
        files = self._files if role.is_chief else None
        complaint = self._agreement.first_complaint("log_dir", _complaint_about(files))
        if complaint is not None:
            raise ConfigurationError(complaint)
        self._curves = ReplicaCurves(files)
        self._has_told = False
        on_lost = tell_what_is_lost("replicas' metrics come no more")
        session = self._windows.begin("replica metrics", self._take, on_lost)
        if self._checks is not None:
            self._checks.close()
        self._checks = Reports(session.below("weights"), self._compare, on_lost)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._of_epoch: list[StepReport] = []
        if self._windows is not None:
            self._windows.own.begin_epoch()

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._windows is not None:
            self._windows.own.begin_step()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._windows is None:
            return
        self._note(self._windows.end_step())
        self._unchecked += self.model.steps_per_execution
        if self.check_every_steps is not None and self._unchecked >= self.check_every_steps:
            self._unchecked = 0
            self._check(self._windows)
        self._tell()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._windows is None:
            return
        self._note(self._windows.end_epoch())
        if self.logs and logs is not None:
            logs.update(self._summary())

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._windows is None:
            return
        self._windows.close(_LAST_SECS)
        if self._checks is not None:
            self._checks.close(_LAST_SECS)
        try:
            self._curves.close()
        except OSError as error:
            self._found.append(f"TensorBoard does not get the end of {self.log_dir}: {error}")
        self._tell()
        # The others ask the chief's process for what was said last.
        self._agreement.barrier("the end of replica metrics")

    # How

    def _note(self, report: StepReport | None) -> None:
        """Of this worker."""
        if report is None:
            return
        if self._is_new and not report.replicas and report.worker == 0:
            warnings.warn(
                "ReplicaMetrics sees nothing of this model's replicas: its `train_step` calls "
                "neither `optimizer.apply` nor `optimizer.apply_gradients`, or it is compiled with "
                "jit_compile=True. There are the workers' times only.",
                stacklevel=3,
            )
        self._is_new = False
        if self.logs:
            self._of_epoch.append(report)

    def _summary(self) -> dict[str, float]:
        """What is asked for in the logs, of all workers: the same on all."""
        own = as_text(merged(self._of_epoch)) if self._of_epoch else ""
        said = self._agreement.gather("replica metrics", own)
        reports = [from_text(text) for text in said if text]
        values = {name: [value for _, value in each] for name, each in values_of(reports).items()}
        found = {}
        for name in self.logs:
            what, _, how = name.rpartition("_")
            if values[what]:
                found[f"replica/{name}"] = float(SPREAD[how](values[what]))
        return found

    def _take(self, reports: list[StepReport]) -> None:
        """From a thread, mostly."""
        try:
            self._curves.add(reports)
        except OSError as error:
            self._note_lost_curves(error)
        same = with_same_data(reports)
        if same and same not in self._same_data:
            self._same_data.add(same)
            self._found.append(
                f"{', '.join(map(str, same))} are given the same data as each other, in each of "
                f"the {reports[0].steps} steps up to step {reports[0].step}. Is the dataset split "
                "over the workers?"
            )

    def _note_lost_curves(self, error: OSError) -> None:
        assert self._files is not None  # who has none writes nothing
        is_near = self._files.traits.is_near
        how_long = "are written no more" if is_near else "do not come there, and are tried again"
        if not self._has_told:
            self._found.append(f"TensorBoard's files in {self.log_dir} {how_long}: {error}")
        self._has_told = True
        if is_near:  # where the writer has failed once, it is of no use
            self._curves = ReplicaCurves(None)

    def _check(self, windows: StepWindows) -> None:
        here = replicas_here(self.model.distribute_strategy)
        if self._checks is None or self.model.distribute_strategy.num_replicas_in_sync == 1:
            return
        step, where = windows.own.updates, windows.own.where
        make = checksums(self.model, windows.own.role.rank * here)
        self._checks.send(lambda: json.dumps([step, where, make()]))

    def _compare(self, told: list[str]) -> None:
        """From a thread."""
        found: dict[int, Mapping[str, str]] = {}
        places: dict[int, str] = {}
        for text in told:
            step, where, own = json.loads(text)
            for replica, each in own.items():
                found[int(replica)], places[int(replica)] = each, where
        apart = divergence(step, found, places)
        if apart is not None and not self._is_apart:
            self._found.append(apart)
        self._is_apart = apart is not None

    def _tell(self) -> None:
        while self._found:
            found = self._found.popleft()
            announce(f"replicas: {found}")
            if isinstance(found, Divergence):
                report(Diverged(**asdict(found), what=str(found)))
                if self.on_divergence is not None:
                    self.on_divergence(found)


def _complaint_about(files: Files | None) -> str | None:
    if files is not None:
        try:
            if (folder := local_path(files.where())) is not None:
                folder.mkdir(parents=True, exist_ok=True)
            files.names()
        except OSError as error:
            return (
                "Expected `log_dir` to be a folder that can be written to. Received: "
                f"{files.where()!r}. Cause: {error}"
            )
    return None
