"""Detects the replica that all others wait for."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from keras_distplug.backend.tensorflow import trainer
from keras_distplug.backend.tensorflow.runtime import callback_list
from keras_distplug.backend.tensorflow.runtime.workers import is_scheduled
from keras_distplug.callbacks.watchdog import Watchdog, require_ints
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.events import SlowReplica
from keras_distplug.core.log import announce
from keras_distplug.core.reporting import report
from keras_distplug.replicas.round_trips import RoundTrips
from keras_distplug.replicas.stragglers import Judge, Straggler
from keras_distplug.step.step_reports import StepReport
from keras_distplug.step.step_windows import OwnWindows, StepWindows, failure_announcer

_LEAST_EVERY_SECS = 1.0  # the shortest interval at which a worker measures its network
_SECS_PER_WORKER = 0.25  # per worker other than the chief, if that makes the interval longer


class StragglerWatchdog(Watchdog):
    """Reports the replica, or the worker with a slow input or network, that all others wait for.

    In synchronous training, every worker's step takes as long as the slowest worker's, so all look
    equally slow from the outside. This callback measures every replica from its data to its
    gradients, before gradients are summed; the time every worker waits for its own data; and, in a
    thread, the round trip of messages from every worker to the chief. The chief compares these in
    a thread. A replica or worker that is slower than the median of the others for several
    consecutive windows of steps is logged, and logged again when it has recovered.

    Example:

    ```python
    watchdog = kd.StragglerWatchdog(on_straggler=lambda found: print(found.where, found.cause))
    model.fit(ds, epochs=10, callbacks=[*kd.defaults("runs/mnist"), watchdog])
    ```

    - It is one of `defaults()`; adding your own instance replaces that one. With a single
      replica, there is nothing to compare.
    - A layer that communicates with other replicas within the step, such as a synchronized
      `BatchNormalization`, makes all replicas as slow as the slowest, which hides the straggler.
    - If the chief's network is slow, the connections of all other workers are. With only one worker
      other than the chief, its network is compared with its own past, so it is only detected if it
      becomes slow during training.
    - Replicas that are logical devices of one CPU share its cores, which makes their times noisy.
      **Not verified on GPU**, where Python sees a gradient only after it has been copied to the
      host.

    Args:
        every_steps: The number of steps per window. Defaults to 10.
        windows: The number of consecutive slow windows after which a straggler is reported.
            Defaults to 4.
        threshold: A replica is slow if the median time of the others is less than `threshold` times
            its own, and the difference is at least a tenth of a step. Defaults to 0.75.
        on_straggler: A function called with every `Straggler`, on the chief, after a batch.
            Defaults to `None`.

    Raises:
        ConfigurationError: If an argument is invalid.
    """

    def __init__(
        self,
        every_steps: int = 10,
        windows: int = 4,
        threshold: float = 0.75,
        *,
        on_straggler: Callable[[Straggler], None] | None = None,
    ) -> None:
        super().__init__()
        require_ints(1, every_steps=every_steps, windows=windows)
        if not 0 < threshold < 1:
            raise ConfigurationError(
                "Expected `threshold` to be greater than 0 and less than 1. Received: "
                f"{threshold!r}"
            )
        self.every_steps = every_steps
        self.windows = windows
        self.threshold = threshold
        self.on_straggler = on_straggler
        self._windows: StepWindows | None = None  # None if there is nothing to compare

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
        if model.distribute_strategy.num_replicas_in_sync > 1:
            self._windows = StepWindows(OwnWindows(model), self.every_steps)

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._windows is not None:
            self._windows.own.disable_counting()

    def on_predict_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self.on_test_begin(logs)

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        if is_scheduled(self.model.distribute_strategy):
            announce(
                "StragglerWatchdog: under ParameterServerStrategy no worker waits for a slow one, "
                "so stragglers are not detected"
            )
        if self._windows is None:
            return
        self._judge = Judge(self.threshold, self.windows)
        self._found: deque[Straggler] = deque()
        self._is_new = True
        self._windows_compared = 0
        self._round_trips: RoundTrips | None = None
        on_lost = failure_announcer("straggler detection has stopped")
        session = self._windows.begin("stragglers", self._compare, on_lost, self._add_network_time)
        role = self._windows.own.role
        if not role.is_chief:
            self._gradient_bytes = sum(
                math.prod(each.shape) * np.dtype(each.dtype).itemsize
                for each in self.model.trainable_variables
            )
            every_secs = max(_LEAST_EVERY_SECS, _SECS_PER_WORKER * (role.world_size - 1))
            self._round_trips = RoundTrips(f"round/{role.rank}", session, every_secs)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._windows is not None:
            self._windows.own.begin_epoch()

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._windows is not None:
            self._windows.own.begin_step()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._windows is None:
            return
        report = self._windows.end_step()
        if report is not None and self._is_new:
            self._is_new = False
            self._warn_if_unmeasured(report)
        while self._found:
            self._report_found(self._found.popleft())

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._windows is not None:
            self._windows.close()

    # Internals

    def _warn_if_unmeasured(self, report: StepReport) -> None:
        if not report.replicas and report.worker == 0:
            warnings.warn(
                "StragglerWatchdog cannot measure the replicas of this model: its `train_step` "
                "calls neither `optimizer.apply` nor `optimizer.apply_gradients`. Replicas that "
                "compute slowly are not detected.",
                stacklevel=2,
            )

    def _add_network_time(self, report: StepReport) -> StepReport:
        """Adds the network's time. Runs in a thread."""
        if self._round_trips is None:
            return report
        network_s, is_new = self._round_trips.seconds_for(self._gradient_bytes)
        return replace(report, network_s=network_s, is_network_new=is_new)

    def _compare(self, reports: list[StepReport]) -> None:
        """Compares one window of all workers. Runs in a thread if there are several workers."""
        self._windows_compared += 1
        if self._windows_compared > 1:  # the first steps are slow everywhere, by different amounts
            self._found += self._judge.add(reports)

    def _report_found(self, found: Straggler) -> None:
        report(
            SlowReplica(
                found.cause,
                found.worker,
                found.where,
                found.own_s,
                found.replica,
                found.others_s,
                found.is_over,
                str(found),
            )
        )
        announce(f"straggler: {found}")
        if self.on_straggler is not None:
            self.on_straggler(found)
