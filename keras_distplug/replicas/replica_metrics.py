"""Per-replica and per-worker metrics of steps, and their spread."""

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
    get_values,
)
from keras_distplug.step.step_reports import (
    StepReport,
    as_text,
    from_text,
    merge_reports,
    replicas_with_same_data,
)
from keras_distplug.step.step_windows import OwnWindows, StepWindows, failure_announcer
from keras_distplug.storage.files import Files, local_path, open_files

_LAST_SECS = 5.0  # to wait at the end for reports in progress

_NAMES = [f"{what}_{how}" for what in (*OF_REPLICAS, *OF_WORKERS) for how in SPREAD]


class ReplicaMetrics(Watchdog):
    """Records metrics of every replica and every worker, and by how much they differ.

    The logs of `fit` are aggregated over all replicas. This callback measures every replica
    before gradients are summed, in windows of steps that the chief collects in a thread:

    - for replicas, `loss`, `gradient_norm`, `samples_per_s`, `compute_ms` (from their data to their
      gradients) and `sync_ms` (from there to the sum of all gradients: waiting for the other
      replicas and for the reduction);
    - for workers, `step_ms`, `input_ms` (waiting for data) and `memory_mb` (of the process).

    It also compares the replicas' weights. Replicas whose weights have diverged train different
    models, which would otherwise go unnoticed.

    Example:

    ```python
    metrics = kd.ReplicaMetrics("runs/mnist/logs", logs=["loss_spread", "step_ms_max"])
    model.fit(ds, epochs=10, callbacks=[*kd.defaults("runs/mnist"), metrics])
    ```

    - TensorBoard shows one chart per metric, such as `distplug/loss`, with a curve for every
      replica or worker, and the `min`, `median`, `p95` and `max` over all. With more than 64
      replicas or workers, only these four are written. Curves continue after a restart.
    - If the step does not use `compute_loss`, `loss` is missing. If the step is compiled by XLA, or
      calls neither `optimizer.apply` nor `optimizer.apply_gradients`, all replica metrics are
      missing, with a warning. With several optimizers, the values are those of the first one
      applied in a step.
    - Under central storage, `sync_ms` is measured for the first replica only. In a single process,
      `input_ms` is not available with `steps_per_execution` above 1.
    - Training results are unchanged, bit for bit. **Not verified on GPU**, where Python sees a
      gradient only after it has been copied to the host.

    Args:
        log_dir: A folder or URL for TensorBoard files, which only the chief writes. In a store,
            whole files are uploaded every minute and at the end. Defaults to `None`: no files.
        every_steps: The number of steps per window. Times are medians over the window, other values
            are means. Defaults to 10.
        storage_options: Options for `log_dir`, as in `BackupAndRestore`. Defaults to `None`.
        logs: Names of values to add to the logs of every epoch, and thus to `History`, on all
            workers: `"<metric>_<statistic>"`, with a metric from above and `min`, `median`, `p95`,
            `max` or `spread` (largest minus smallest). For example, `"loss_spread"` is logged as
            `replica/loss_spread`. After a restart in mid-epoch, values cover the batches since the
            restart. Defaults to `()`.
        check_every_steps: The interval, in steps, at which the weights and optimizer variables of
            all replicas are compared. Checksums are computed in a thread; until they are finished,
            variables that change occupy memory twice. `None` disables the comparison. Defaults to
            1000.
        fingerprints: `True` detects replicas that are given the same data in every step, at the
            cost of a checksum of every batch. Defaults to `False`.
        on_divergence: A function called with every `Divergence`, on the chief, after a batch.
            Defaults to `None`.

    Raises:
        ConfigurationError: If an argument is invalid.
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
            raise ConfigurationError(
                "Expected `storage_options` only together with `log_dir`. Received: "
                "`storage_options` without `log_dir`. Pass `log_dir`, or omit `storage_options`."
            )
        if isinstance(logs, str) or any(name not in _NAMES for name in logs):
            raise ConfigurationError(
                f"Expected `logs` to be a list of names from {', '.join(_NAMES)}. "
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
        self._windows: StepWindows | None = None  # None if another instance does the work
        self._checks: Reports | None = None

    # Keras' hooks, in calling order

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        trainer.adapt(model)
        if self._windows is not None:  # the last `fit` ended with an error
            self._windows.close()
        self._windows = None
        # Done here because Keras builds the step before `on_train_begin`.
        if self.defers_to_other(callback_list.move_to_front(self)):
            return
        if is_scheduled(model.distribute_strategy):
            announce(
                "ReplicaMetrics: under ParameterServerStrategy, every worker runs its own steps, "
                "so there are no replicas to compare and nothing is written"
            )
            return
        own = OwnWindows(model, syncs=True, readings=True, fingerprints=self.fingerprints)
        self._windows = StepWindows(own, self.every_steps)

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._windows is not None:
            self._windows.own.disable_counting()

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
        self._agreement = agreement.get_channel(role)
        files = self._files if role.is_chief else None
        error = self._agreement.first_error("log_dir", _log_dir_error(files))
        if error is not None:
            raise ConfigurationError(error)
        self._curves = ReplicaCurves(files)
        self._has_warned = False
        on_lost = failure_announcer("replica metrics have stopped")
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
        self._report_found()

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
            self._found.append(
                f"the last TensorBoard data could not be written to {self.log_dir}: {error}"
            )
        self._report_found()
        # The other workers still fetch their last messages from the chief's process.
        self._agreement.barrier("the end of replica metrics")

    # Internals

    def _note(self, report: StepReport | None) -> None:
        """Keeps this worker's report for the epoch's logs, and warns if it has no replicas."""
        if report is None:
            return
        if self._is_new and not report.replicas and report.worker == 0:
            warnings.warn(
                "ReplicaMetrics cannot measure the replicas of this model: its `train_step` calls "
                "neither `optimizer.apply` nor `optimizer.apply_gradients`, or XLA compiles it "
                "(jit_compile=True, or Keras' default on a single GPU; pass jit_compile=False to "
                "`compile`). Only the metrics of workers are recorded.",
                stacklevel=3,
            )
        self._is_new = False
        if self.logs:
            self._of_epoch.append(report)

    def _summary(self) -> dict[str, float]:
        """Returns the requested log values over all workers, identical on every worker."""
        own = as_text(merge_reports(self._of_epoch)) if self._of_epoch else ""
        said = self._agreement.gather("replica metrics", own)
        reports = [from_text(text) for text in said if text]
        values = {name: [value for _, value in each] for name, each in get_values(reports).items()}
        found = {}
        for name in self.logs:
            what, _, how = name.rpartition("_")
            if values[what]:
                found[f"replica/{name}"] = float(SPREAD[how](values[what]))
        return found

    def _take(self, reports: list[StepReport]) -> None:
        """Records one window of all workers. Runs in a thread if there are several workers."""
        try:
            self._curves.add(reports)
        except OSError as error:
            self._note_lost_curves(error)
        same = replicas_with_same_data(reports)
        if same and same not in self._same_data:
            self._same_data.add(same)
            self._found.append(
                f"{', '.join(map(str, same))} received the same data in all {reports[0].steps} "
                f"steps up to step {reports[0].step}. Is the dataset split across the workers?"
            )

    def _note_lost_curves(self, error: OSError) -> None:
        assert self._files is not None  # without files, nothing is written
        is_near = self._files.traits.is_near
        how_long = "are no longer written" if is_near else "could not be written; retrying"
        if not self._has_warned:
            self._found.append(f"TensorBoard files in {self.log_dir} {how_long}: {error}")
        self._has_warned = True
        if is_near:  # the writer is unusable after a failure
            self._curves = ReplicaCurves(None)

    def _check(self, windows: StepWindows) -> None:
        here = replicas_here(self.model.distribute_strategy)
        if self._checks is None or self.model.distribute_strategy.num_replicas_in_sync == 1:
            return
        step, where = windows.own.updates, windows.own.where
        make = checksums(self.model, windows.own.role.rank * here)
        self._checks.send(lambda: json.dumps([step, where, make()]))

    def _compare(self, messages: list[str]) -> None:
        """Compares the checksums of all workers. Runs in a thread."""
        found: dict[int, Mapping[str, str]] = {}
        places: dict[int, str] = {}
        for text in messages:
            step, where, own = json.loads(text)
            for replica, each in own.items():
                found[int(replica)], places[int(replica)] = each, where
        apart = divergence(step, found, places)
        if apart is not None and not self._is_apart:
            self._found.append(apart)
        self._is_apart = apart is not None

    def _report_found(self) -> None:
        while self._found:
            found = self._found.popleft()
            announce(f"replicas: {found}")
            if isinstance(found, Divergence):
                report(Diverged(**asdict(found), what=str(found)))
                if self.on_divergence is not None:
                    self.on_divergence(found)


def _log_dir_error(files: Files | None) -> str | None:
    if files is not None:
        try:
            if (folder := local_path(files.where())) is not None:
                folder.mkdir(parents=True, exist_ok=True)
            files.names()
        except OSError as error:
            return (
                "Expected `log_dir` to be a writable folder. Received: "
                f"{files.where()!r}. Cause: {error}"
            )
    return None
