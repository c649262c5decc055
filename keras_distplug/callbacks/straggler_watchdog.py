"""Naming the replica that all others wait for."""

from __future__ import annotations

import json
import math
import socket
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import keras
import numpy as np

from keras_distplug.callbacks.one_of_a_kind import stood_aside
from keras_distplug.cluster import agreement
from keras_distplug.cluster.reports import Reports
from keras_distplug.cluster.round_trips import RoundTrips
from keras_distplug.compat import callback_list, steps, trainer
from keras_distplug.core.errors import AgreementError, ConfigurationError
from keras_distplug.core.log import announce
from keras_distplug.core.stragglers import Judge, Pace, Straggler
from keras_distplug.storage.commit import Writer
from keras_distplug.training.guard import Guard

_EVERY_SECS = 1.0  # of a measurement of the network, for each worker that there is beside the chief


class StragglerWatchdog(keras.callbacks.Callback):  # type: ignore[misc]
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
        for name, value in {"every_steps": every_steps, "windows": windows}.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(
                    f"Expected `{name}` to be an int >= 1. Received: {value!r}"
                )
        if not 0 < threshold < 1:
            raise ConfigurationError(
                f"Expected `threshold` to be a number between 0 and 1. Received: {threshold!r}"
            )
        self.every_steps = every_steps
        self.windows = windows
        self.threshold = threshold
        self.on_straggler = on_straggler
        self._guard: Guard | None = None  # not where there is nothing to compare
        self._reports: Reports | None = None

    # Keras' hooks, in the order in which they come

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        trainer.adapt(model)
        self._guard = None
        # Here, because Keras makes the step before `on_train_begin`.
        if stood_aside(self, callback_list.move_to_front(self)):
            return
        if model.distribute_strategy.num_replicas_in_sync > 1:
            self._guard = Guard.of(model)
            self._laps = self._guard.want_times()

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._guard is not None:
            self._guard.unwant()

    def on_predict_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self.on_test_begin(logs)

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._guard is None:
            return
        self._close()
        self._role = agreement.role_under(self.model.distribute_strategy)
        self._where = f"{self._role.name} on {socket.gethostname()}"
        self._judge = Judge(self.threshold, self.windows)
        self._found: deque[Straggler] = deque()
        self._waits_s: list[float] = []
        self._steps_s: list[float] = []
        self._stepped_s: float | None = None
        self._seen = 0
        self._is_new = True
        self._laps.clear()
        if self._role.world_size > 1:
            words = agreement.among(self._role)
            session = Writer.new_attempt() if self._role.is_chief else None
            session = words.from_chief("stragglers", session)
            self._gradient_bytes = sum(
                math.prod(each.shape) * np.dtype(each.dtype).itemsize
                for each in self.model.trainable_variables
            )
            self._round_trips = None
            if not self._role.is_chief:
                others = self._role.world_size - 1
                topic = f"{session}/round/{self._role.rank}"
                self._round_trips = RoundTrips(topic, words, _EVERY_SECS * others)
            self._reports = Reports(session, self._role, words, self._compare, self._on_lost)
            steps.hear_of_fetches(self.model, self._waits_s.append)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._stepped_s = None

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._guard is None:
            return
        now_s = time.perf_counter()
        if self._stepped_s is not None:
            self._steps_s.append(now_s - self._stepped_s)
        self._stepped_s = now_s
        self._seen += self.model.steps_per_execution
        if self._seen >= self.every_steps and self._steps_s:
            self._end_window()
        while self._found:
            self._tell(self._found.popleft())

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        self._close()

    # How

    def _end_window(self) -> None:
        laps = [self._laps.popleft() for _ in range(len(self._laps))]
        steps_s, waits_s = self._steps_s[:], self._waits_s[:]
        for seen in (self._steps_s, self._waits_s):
            seen.clear()
        self._seen = 0
        if self._is_new:  # the first steps are slow for all, each in its own way
            self._is_new = False
            if not laps and self._role.is_chief:
                warnings.warn(
                    "StragglerWatchdog sees no times of this model: its `train_step` calls neither "
                    "`optimizer.apply` nor `optimizer.apply_gradients`, or it is compiled with "
                    "jit_compile=True. No straggler is told of.",
                    stacklevel=2,
                )
            return
        computed_s: dict[int, list[float]] = {}
        for lap in laps:
            computed_s.setdefault(lap.replica, []).append(lap.compute_s)
        pace = Pace(
            self._role.rank,
            self._where,
            statistics.median(steps_s) / self.model.steps_per_execution,
            {replica: statistics.median(each) for replica, each in computed_s.items()},
            statistics.mean(waits_s) if waits_s else None,
        )
        if self._reports is None:
            self._found += self._judge.hear([pace])
        else:
            self._reports.send(lambda: json.dumps(asdict(self._with_network(pace))))

    def _with_network(self, pace: Pace) -> Pace:
        """From a thread."""
        if self._round_trips is None:
            return pace
        network_s, is_new = self._round_trips.seconds_for(self._gradient_bytes)
        return replace(pace, network_s=network_s, is_network_new=is_new)

    def _compare(self, reports: list[str]) -> None:
        """From a thread."""
        told = [json.loads(text) for text in reports]
        self._found += self._judge.hear(
            [
                Pace(**{**each, "compute_s": {int(n): s for n, s in each["compute_s"].items()}})
                for each in told
            ]
        )

    def _tell(self, found: Straggler) -> None:
        announce(f"straggler: {found}")
        if self.on_straggler is not None:
            self.on_straggler(found)

    def _on_lost(self, error: AgreementError) -> None:
        """From a thread."""
        if not isinstance(
            error.__cause__, ConnectionError
        ):  # a lost worker ends `fit`, which tells
            announce(f"stragglers are looked for no more: {error}")

    def _close(self) -> None:
        if self._reports is not None:
            self._reports.close()
            self._reports = None
            steps.hear_of_fetches(self.model, None)
