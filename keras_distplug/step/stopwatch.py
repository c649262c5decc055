"""Measures times within a step on every replica, before it waits for the others."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
import xxhash

from keras_distplug.backend.tensorflow.input.pipeline import is_op_determinism_on
from keras_distplug.backend.tensorflow.replicas import gates, products, share
from keras_distplug.backend.tensorflow.replicas.gates import dense
from keras_distplug.backend.tensorflow.runtime.workers import is_scheduled, replicas_here
from keras_distplug.step import recorded_times
from keras_distplug.step.instrumentation import StepInstrument, StepInstrumentation
from keras_distplug.step.replica_step import ReplicaStep, get_size, scales_loss

_KEPT = 10_000  # the most records to keep if no listener takes them
_STARTED, _COMPUTED, _SUMMED = "started", "computed", "summed"


class Lap(NamedTuple):
    """One replica's measurements in a step. One is created per step, so it must be cheap.

    Args:
        replica: The replica's number among all replicas.
        begun_s: The time at which its part of the batch was available, by `time.perf_counter`.
        compute_s: The time from then to its own gradients, before summation, in seconds.
        reading: Its loss and gradient norm; None if not requested.
        fingerprint: The fingerprint of its part of the batch; None if not requested.
    """

    replica: int
    start_s: float
    compute_s: float
    reading: Reading | None = None
    fingerprint: str | None = None


@dataclass(frozen=True)
class Reading:
    """Results of a replica's own samples, before gradients are summed over replicas.

    Args:
        samples: The number of samples.
        loss: The mean loss of the samples; NaN if the step does not use `compute_loss`.
        gradient_norm: The norm of that loss's gradients.
    """

    samples: float
    loss: float
    gradient_norm: float


class Sync(NamedTuple):
    """The time from a replica's own gradients to the sum over all replicas."""

    replica: int
    sync_s: float


@dataclass
class Measurements:
    """The latest measurements of all replicas of a process, for one listener.

    Args:
        laps: One lap per replica and step.
        syncs: One wait per replica and step.
        traces: The number of times a step was traced, which delays the start of all replicas.
    """

    laps: deque[Lap] = field(default_factory=lambda: deque(maxlen=_KEPT))
    syncs: deque[Sync] = field(default_factory=lambda: deque(maxlen=_KEPT))
    traces: int = 0
    collect: Callable[[], None] = lambda: None  # fetches the times recorded in the graph


@dataclass(frozen=True)
class _Requested:
    """The optional measurements that listeners have requested."""

    syncs: bool = False
    readings: bool = False
    fingerprints: bool = False

    def __or__(self, other: _Requested) -> _Requested:
        return _Requested(
            self.syncs or other.syncs,
            self.readings or other.readings,
            self.fingerprints or other.fingerprints,
        )


def listen(
    model: keras.Model, *, syncs: bool = False, readings: bool = False, fingerprints: bool = False
) -> Measurements:
    """Measures replicas in the `fit` that is starting. Call it from a callback's `set_model`.

    Args:
        model: The model.
        syncs: True to also measure the time from own gradients to the sum of all.
        readings: True to add a `Reading` to every lap.
        fingerprints: True to add a fingerprint of the replica's part of the batch to every lap.
    """
    instrumentation = StepInstrumentation.of(model)
    stopwatch = instrumentation.shared(Stopwatch)
    if not instrumentation.is_used(stopwatch):
        stopwatch.forget_listeners()  # of an earlier `fit`
    measurements = stopwatch.listen(_Requested(syncs, readings, fingerprints))
    if not is_scheduled(model.distribute_strategy):  # whose workers cannot call Python here
        instrumentation.use(stopwatch)
    return measurements


class Stopwatch(StepInstrument):
    """Measures times within a step.

    A process with a single replica uses TensorFlow's clock. With several replicas this is not
    possible, because stateful operations wait for each other across the replicas of a process.
    Then a stateless Python function is called when its inputs are available. The step must depend
    on its result, or TensorFlow would prune it from the graph. The same method is used if a
    `Reading` or a fingerprint is requested.
    """

    def __init__(self, model: keras.Model) -> None:
        self._listeners: list[Measurements] = []
        self._requested = _Requested()
        strategy = model.distribute_strategy
        is_alone = not is_scheduled(strategy) and replicas_here(strategy) == 1
        self._recorded = recorded_times.RecordedTimes() if is_alone else None
        self._replica = 0

    def forget_listeners(self) -> None:
        self._listeners, self._requested = [], _Requested()
        if self._recorded is not None:
            self._recorded.take()

    def listen(self, requested: _Requested) -> Measurements:
        """Adds a listener and returns the object that receives its measurements."""
        measurements = Measurements(collect=self._collect)
        self._listeners.append(measurements)
        self._requested |= requested
        return measurements

    @property
    def is_in_graph(self) -> bool:
        """True if times are recorded in the graph, to be fetched by `Measurements.collect`."""
        is_plain = not (self._requested.readings or self._requested.fingerprints)
        # `tf.timestamp` raises an error if op determinism is enabled.
        return self._recorded is not None and is_plain and not is_op_determinism_on()

    def _collect(self) -> None:
        if self._recorded is None:
            return
        times = self._recorded.take().tolist()
        laps = [
            Lap(self._replica, start_s, computed_s - start_s) for start_s, computed_s, _ in times
        ]
        syncs = [
            Sync(self._replica, summed_s - computed_s)
            for _, computed_s, summed_s in times
            if summed_s != recorded_times.NOT_RECORDED
        ]
        for measurements in self._listeners:
            measurements.laps.extend(laps)
            measurements.syncs.extend(syncs)

    # The hooks of an instrument

    def signature(self) -> Hashable:
        return self._requested, self.is_in_graph

    def before(self, step: ReplicaStep, batch: Any) -> Any:
        if step.is_compiled:
            return batch
        if not self.is_in_graph:
            batch, step.notes[_STARTED] = self.record_start(batch)
            return batch
        self._count_trace()
        self._replica = int(tf.get_static_value(step.replica))
        tensors = _get_tensors(batch)
        step.notes[_STARTED] = started = recorded_times.now(tensors, tensors[0])
        with tf.control_dependencies([started]):
            return tf.nest.map_structure(_identity, batch, expand_composites=True)

    def after_gradients(
        self, step: ReplicaStep, optimizer: keras.optimizers.Optimizer, gradients: Sequence[Any]
    ) -> Sequence[Any]:
        started = step.notes.get(_STARTED)
        if started is None or not gates.is_here(started):
            return gradients
        if self.is_in_graph:
            if _COMPUTED not in step.notes:  # only the first optimizer's gradients are timed
                gradients, step.notes[_COMPUTED] = _timed(gradients, optimizer)
            return gradients
        del step.notes[_STARTED]
        reading = self._reading(step, optimizer, gradients) if self._requested.readings else ()
        fingerprinted = step.plain_data() if self._requested.fingerprints else ()
        gradients, computed = self.record_gradients(started, gradients, reading, fingerprinted)
        if self._requested.syncs and step.is_one_of_several:
            step.notes[_COMPUTED, id(optimizer)] = computed
        return gradients

    def after_sum(
        self, step: ReplicaStep, optimizer: keras.optimizers.Optimizer, gradients: Sequence[Any]
    ) -> Sequence[Any]:
        if self.is_in_graph:
            is_requested = self._requested.syncs and step.is_one_of_several
            if is_requested and _COMPUTED in step.notes and _SUMMED not in step.notes:
                gradients, step.notes[_SUMMED] = _timed(gradients, optimizer)
            return gradients
        computed = step.notes.pop((_COMPUTED, id(optimizer)), None)
        if computed is None or not gates.is_here(computed):
            return gradients
        return self.record_sums(computed, gradients)

    def after(self, step: ReplicaStep, logs: Any) -> None:
        if self._recorded is None or not self.is_in_graph or _COMPUTED not in step.notes:
            return
        recorded = [
            step.notes[name] for name in (_STARTED, _COMPUTED, _SUMMED) if name in step.notes
        ]
        if all(map(gates.is_here, recorded)):
            self._recorded.record(*recorded)

    # Internals

    @staticmethod
    def _reading(
        step: ReplicaStep, optimizer: keras.optimizers.Optimizer, own: Sequence[Any]
    ) -> tuple[tf.Tensor, ...]:
        together = share.current()
        factor = tf.ones([])
        if together is not None:  # from its contribution to the global mean to its own mean
            factor *= together.replicas
            if id(optimizer) in together.in_loss:
                factor = tf.math.divide_no_nan(factor, together.weight)
        if scales_loss(optimizer) and optimizer.built:
            factor /= tf.cast(optimizer.dynamic_scale, tf.float32)
        norm = factor * step.norm(own)
        loss = step.loss() if step.losses else tf.constant(math.nan)
        return step.samples(), loss, norm

    def record_start(self, data: Any) -> tuple[Any, tf.Tensor]:
        """Returns `data`, and the time at which it was available, on which it depends."""
        self._count_trace()
        tensors = _get_tensors(data)
        started = _python_call(_now, tensors, _first_value(tensors[0]))
        with tf.control_dependencies([started]):
            return tf.nest.map_structure(_identity, data, expand_composites=True), started

    def _count_trace(self) -> None:
        if tf.inside_function():
            for measurements in self._listeners:
                measurements.traces += 1

    def record_gradients(
        self,
        started: tf.Tensor,
        own: Sequence[Any],
        reading: Sequence[tf.Tensor] = (),
        fingerprinted: Sequence[tf.Tensor] = (),
    ) -> tuple[list[Any], tf.Tensor]:
        """Records a lap once all gradients of this replica are available.

        Args:
            started: The time returned by `record_start`.
            own: The replica's gradients; None for a variable without one.
            reading: The values of a `Reading`.
            fingerprinted: The arrays to compute the fingerprint from.

        Returns:
            The same gradients, one of which depends on the recording; and the time.
        """

        def note(part: Any, replica: Any, start_s: Any, *others: Any) -> np.ndarray:
            read, arrays = others[: len(reading)], others[len(reading) :]
            return self._note(replica, start_s, read, arrays)

        return _record_when_ready(note, own, _number(), started, *reading, *fingerprinted)

    def record_sums(self, computed: tf.Tensor, summed: Sequence[Any]) -> list[Any]:
        """Records the wait from `computed` to the sums over all replicas; returns the sums, one of
        which depends on the recording."""

        def note(part: Any, replica: Any, computed_s: Any) -> np.ndarray:
            now_s = time.perf_counter()
            sync = Sync(int(replica), now_s - float(computed_s))
            for measurements in self._listeners:
                measurements.syncs.append(sync)
            return np.array(now_s)

        gradients, _ = _record_when_ready(note, summed, _number(), computed)
        return gradients

    def _note(
        self, replica: Any, start_s: Any, reading: Sequence[Any], fingerprinted: Sequence[Any]
    ) -> np.ndarray:
        now_s = time.perf_counter()
        lap = Lap(
            int(replica),
            float(start_s),
            now_s - float(start_s),
            Reading(*(float(each) for each in reading)) if reading else None,
            compute_fingerprint(fingerprinted) if fingerprinted else None,
        )
        for measurements in self._listeners:
            measurements.laps.append(lap)
        return np.array(now_s)


def compute_fingerprint(arrays: Sequence[Any]) -> str:
    """Returns a hash of the arrays' bytes; strings are hashed in UTF-8, as pipelines store them."""
    found = xxhash.xxh3_64()
    for each in arrays:
        array = np.ascontiguousarray(each)
        if array.dtype == object:
            for text in array.ravel():
                found.update(text if isinstance(text, bytes) else str(text).encode())
        else:
            found.update(array.reshape(-1).view(np.uint8).data)
    digest: str = found.hexdigest()
    return digest


def _get_tensors(data: Any) -> list[tf.Tensor]:
    flat = tf.nest.flatten(data, expand_composites=True)
    return [each for each in flat if isinstance(each, tf.Tensor)]


def _number() -> Any:
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def _record_when_ready(
    note: Callable[..., np.ndarray], gradients: Sequence[Any], *arguments: Any
) -> tuple[list[Any], tf.Tensor]:
    """Calls `note` with a part of a gradient and `arguments` once all gradients are available."""
    present, place = _find_smallest(gradients)
    every = [dense(gradients[i]) for i in present]
    recorded = _python_call(note, every, _first_value(dense(gradients[place])), *arguments)
    waiting = _make_dependent(recorded, gradients[place])
    return [*gradients[:place], waiting, *gradients[place + 1 :]], recorded


def _find_smallest(gradients: Sequence[Any]) -> tuple[list[int], int]:
    """Returns the indices of all gradients, and of the smallest one that is not a product."""
    present = [i for i, gradient in enumerate(gradients) if gradient is not None]
    return present, min(
        present, key=lambda i: (products.is_product(gradients[i]), get_size(gradients[i]))
    )


def _timed(
    gradients: Sequence[Any], optimizer: keras.optimizers.Optimizer
) -> tuple[list[Any], tf.Tensor]:
    """Returns the gradients, one of which waits for the timestamp, and the timestamp."""
    present, place = _find_smallest(gradients)
    awaited = products.copies(optimizer, gradients)
    there = recorded_times.now([dense(awaited[i]) for i in present], dense(awaited[place]))
    with tf.control_dependencies([there]):
        waiting = tf.nest.map_structure(_identity, gradients[place], expand_composites=True)
    return [*gradients[:place], waiting, *gradients[place + 1 :]], there


def _make_dependent(stamp: tf.Tensor, gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = _make_dependent(stamp, gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    # TensorFlow would remove a control edge to an identity operation, and with it the call.
    return tf.where(stamp >= 0, gradient, tf.zeros_like(gradient))


def _python_call(
    function: Callable[..., np.ndarray], after: Sequence[tf.Tensor], *arguments: tf.Tensor
) -> tf.Tensor:
    with tf.control_dependencies(after):
        given = tf.numpy_function(function, arguments, tf.float64, stateful=False)
    return tf.reshape(given, [])


def _now(_: Any) -> np.ndarray:
    return np.array(time.perf_counter())


def _first_value(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a small value that depends on `tensor`: a function of constants only would be folded,
    that is, called only once when the graph is built."""
    return tf.reshape(tensor, [-1])[:1]


def _identity(value: Any) -> Any:
    return tf.identity(value) if isinstance(value, tf.Tensor) else value
