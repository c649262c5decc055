"""Naming the replica that all others wait for."""

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
from keras_distplug.step.step_windows import OwnWindows, StepWindows, tell_what_is_lost

_EVERY_SECS = 1.0  # a worker measures its network
_EACH_SECS = 0.25  # for each worker that there is beside the chief, if that is more


class StragglerWatchdog(Watchdog):
    """Says which replica, or whose input or network, all others wait for.

    In synchronous training every worker's step takes as long as that of the slowest, so that from
    outside all look the same. Here each replica takes the time from its data to its gradients,
    before those are summed, and each worker that for which it waits for its own data, and, in a
    thread, that of messages to the chief and back. The chief compares them, in a thread: one that
    is slower than the median of the others, in several windows of steps in a row, is told of in a
    line, and again when it is over.

    Example:

    ```python
    watchdog = kd.StragglerWatchdog(on_straggler=lambda found: print(found.where, found.cause))
    model.fit(ds, epochs=10, callbacks=[*kd.defaults("runs/mnist"), watchdog])
    ```

    - It is among `defaults()`; one of your own takes its place. A single replica has nobody to
      compare it with.
    - A layer that talks to other replicas within the step, such as a synchronized
      `BatchNormalization`, makes all as slow as the slowest: that is not seen.
    - A slow network of the chief is one of all others. One of the only other worker is found by its
      own past, so that it has to become slow.
    - Replicas that are logical devices of one CPU share its cores, which makes their times noisy.
      **Not verified on GPU**, where a gradient is there for Python when it has been copied.

    Args:
        every_steps: How many steps are a window. Defaults to 10.
        windows: So many windows in a row, in which it is slow, make a straggler. Defaults to 4.
        threshold: A replica is slow if the median of the others' time is less than so many times
            its own, and a tenth of the step goes by for that. Defaults to 0.75.
        on_straggler: Called with each `Straggler`, on the chief, behind a batch. Defaults to
            `None`.

    Raises:
        ConfigurationError: For an argument that is not usable.
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
                f"Expected `threshold` to be a number between 0 and 1. Received: {threshold!r}"
            )
        self.every_steps = every_steps
        self.windows = windows
        self.threshold = threshold
        self.on_straggler = on_straggler
        self._windows: StepWindows | None = None  # not where there is nothing to compare

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
        if model.distribute_strategy.num_replicas_in_sync > 1:
            self._windows = StepWindows(OwnWindows(model), self.every_steps)

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._windows is not None:
            self._windows.own.unwant()

    def on_predict_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self.on_test_begin(logs)

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        if is_scheduled(self.model.distribute_strategy):
            announce("StragglerWatchdog: nobody waits for a slow worker, so none is looked for")
        if self._windows is None:
            return
        self._judge = Judge(self.threshold, self.windows)
        self._found: deque[Straggler] = deque()
        self._is_new = True
        self._heard = 0
        self._round_trips: RoundTrips | None = None
        on_lost = tell_what_is_lost("stragglers are looked for no more")
        session = self._windows.begin("stragglers", self._compare, on_lost, self._with_network)
        role = self._windows.own.role
        if not role.is_chief:
            self._gradient_bytes = sum(
                math.prod(each.shape) * np.dtype(each.dtype).itemsize
                for each in self.model.trainable_variables
            )
            every_secs = max(_EVERY_SECS, _EACH_SECS * (role.world_size - 1))
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
            self._say_what_is_not_seen(report)
        while self._found:
            self._tell(self._found.popleft())

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._windows is not None:
            self._windows.close()

    # How

    def _say_what_is_not_seen(self, report: StepReport) -> None:
        if not report.replicas and report.worker == 0:
            warnings.warn(
                "StragglerWatchdog sees no times of this model: its `train_step` calls neither "
                "`optimizer.apply` nor `optimizer.apply_gradients`, or it is compiled with "
                "jit_compile=True. No straggler is told of.",
                stacklevel=2,
            )

    def _with_network(self, report: StepReport) -> StepReport:
        """From a thread."""
        if self._round_trips is None:
            return report
        network_s, is_new = self._round_trips.seconds_for(self._gradient_bytes)
        return replace(report, network_s=network_s, is_network_new=is_new)

    def _compare(self, reports: list[StepReport]) -> None:
        """From a thread, mostly."""
        self._heard += 1
        if self._heard > 1:  # the first steps are slow for all, each in its own way
            self._found += self._judge.hear(reports)

    def _tell(self, found: Straggler) -> None:
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
