"""Times within a step, taken by each replica before it waits for the others."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import xxhash

from keras_distplug.backend.tensorflow.input.pipeline import is_op_determinism_on
from keras_distplug.backend.tensorflow.replicas import gates, share
from keras_distplug.backend.tensorflow.replicas.gates import dense
from keras_distplug.backend.tensorflow.runtime.workers import is_scheduled, replicas_here
from keras_distplug.step import noted_times
from keras_distplug.step.instrumentation import StepInstrument, StepInstrumentation
from keras_distplug.step.replica_step import ReplicaStep, scales_loss, size_of

_KEPT = 10_000  # of what nobody takes
_BEGUN, _COMPUTED, _SUMMED = "begun", "computed", "summed"


@dataclass(frozen=True)
class Lap:
    """What one replica did in a step.

    Args:
        replica: Its number among all replicas.
        begun_s: When its part of the batch was there, by `time.perf_counter`.
        compute_s: How long it took from there to its own gradients, before those of all are summed.
        reading: What else is wanted of it.
        fingerprint: Of its part of the batch, if that is wanted.
    """

    replica: int
    begun_s: float
    compute_s: float
    reading: Reading | None = None
    fingerprint: str | None = None


@dataclass(frozen=True)
class Reading:
    """What a replica's own samples gave, before gradients are summed over replicas.

    Args:
        samples: How many.
        loss: The mean over them; NaN if the step does not take it from `compute_loss`.
        gradient_norm: Of that loss.
    """

    samples: float
    loss: float
    gradient_norm: float


@dataclass(frozen=True)
class Sync:
    """How long a replica waited, from its own gradients to the sum of those of all."""

    replica: int
    sync_s: float


@dataclass
class Heard:
    """Where times come to stand, of all replicas of a process; of each, the last ones.

    Args:
        laps: Of each replica in each step.
        syncs: The same.
        traces: How often a step was traced, which takes its time before any replica begins.
    """

    laps: deque[Lap] = field(default_factory=lambda: deque(maxlen=_KEPT))
    syncs: deque[Sync] = field(default_factory=lambda: deque(maxlen=_KEPT))
    traces: int = 0
    collect: Callable[[], None] = lambda: None  # fetches the times recorded in the graph


@dataclass(frozen=True)
class _Wanted:
    """What listeners want to hear."""

    syncs: bool = False
    readings: bool = False
    fingerprints: bool = False

    def __or__(self, other: _Wanted) -> _Wanted:
        return _Wanted(
            self.syncs or other.syncs,
            self.readings or other.readings,
            self.fingerprints or other.fingerprints,
        )


def listen(
    model: keras.Model, *, syncs: bool = False, readings: bool = False, fingerprints: bool = False
) -> Heard:
    """Has the times of replicas taken in the `fit` that begins; from a callback's `set_model`.

    Args:
        model: The model.
        syncs: Whether those are wanted, too, from their own gradients to the sum of all.
        readings: Whether laps have a `Reading`.
        fingerprints: Whether they have a fingerprint of the replica's part of the batch.
    """
    instrumentation = StepInstrumentation.of(model)
    stopwatch = instrumentation.shared(Stopwatch)
    if not instrumentation.is_used(stopwatch):
        stopwatch.forget_listeners()  # of an earlier `fit`
    heard = stopwatch.listen(_Wanted(syncs, readings, fingerprints))
    if not is_scheduled(model.distribute_strategy):  # whose workers cannot call Python here
        instrumentation.use(stopwatch)
    return heard


class Stopwatch(StepInstrument):
    """Takes times within a step.

    The only replica of a process has TensorFlow's clock. Of several that will not do: operations
    with a state wait for each other across the replicas of a process. There a function of Python's
    without a state is called when its inputs are there, and must give something that is needed, or
    it is left out. So it is where a `Reading` or a fingerprint is wanted.
    """

    def __init__(self, model: keras.Model) -> None:
        self._listeners: list[Heard] = []
        self._wanted = _Wanted()
        strategy = model.distribute_strategy
        is_alone = not is_scheduled(strategy) and replicas_here(strategy) == 1
        self._noted = noted_times.NotedTimes() if is_alone else None
        self._replica = 0

    def forget_listeners(self) -> None:
        self._listeners, self._wanted = [], _Wanted()
        if self._noted is not None:
            self._noted.take()

    def listen(self, wanted: _Wanted) -> Heard:
        """From now on."""
        heard = Heard(collect=self._collect)
        self._listeners.append(heard)
        self._wanted |= wanted
        return heard

    @property
    def is_in_graph(self) -> bool:
        """Whether times are recorded in the graph, and fetched by `Heard.collect`."""
        is_plain = not (self._wanted.readings or self._wanted.fingerprints)
        # `tf.timestamp` raises an error if op determinism is enabled.
        return self._noted is not None and is_plain and not is_op_determinism_on()

    def _collect(self) -> None:
        if self._noted is None:
            return
        for begun_s, computed_s, summed_s in self._noted.take().tolist():
            lap = Lap(self._replica, begun_s, computed_s - begun_s)
            for heard in self._listeners:
                heard.laps.append(lap)
            if summed_s != noted_times.NOT_NOTED:
                sync = Sync(self._replica, summed_s - computed_s)
                for heard in self._listeners:
                    heard.syncs.append(sync)

    # The hooks of an instrument

    def signature(self) -> Hashable:
        return self._wanted, self.is_in_graph

    def before(self, step: ReplicaStep, batch: Any) -> Any:
        if step.is_compiled:
            return batch
        if not self.is_in_graph:
            batch, step.notes[_BEGUN] = self.begun(batch)
            return batch
        self._note_trace()
        self._replica = int(tf.get_static_value(step.replica))
        tensors = _tensors_of(batch)
        step.notes[_BEGUN] = begun = noted_times.now(tensors, tensors[0])
        with tf.control_dependencies([begun]):
            return tf.nest.map_structure(_identity, batch, expand_composites=True)

    def after_gradients(
        self, step: ReplicaStep, optimizer: keras.optimizers.Optimizer, gradients: Sequence[Any]
    ) -> Sequence[Any]:
        begun = step.notes.get(_BEGUN)
        if begun is None or not gates.is_here(begun):
            return gradients
        if self.is_in_graph:
            if _COMPUTED not in step.notes:  # the first optimizer's gradients are the ones
                gradients, step.notes[_COMPUTED] = _when_there(gradients)
            return gradients
        del step.notes[_BEGUN]
        reading = self._reading(step, optimizer, gradients) if self._wanted.readings else ()
        fingerprinted = step.plain_data() if self._wanted.fingerprints else ()
        gradients, computed = self.computed(begun, gradients, reading, fingerprinted)
        if self._wanted.syncs and step.is_one_of_several:
            step.notes[_COMPUTED, id(optimizer)] = computed
        return gradients

    def after_sum(
        self, step: ReplicaStep, optimizer: keras.optimizers.Optimizer, gradients: Sequence[Any]
    ) -> Sequence[Any]:
        if self.is_in_graph:
            is_wanted = self._wanted.syncs and step.is_one_of_several
            if is_wanted and _COMPUTED in step.notes and _SUMMED not in step.notes:
                gradients, step.notes[_SUMMED] = _when_there(gradients)
            return gradients
        computed = step.notes.pop((_COMPUTED, id(optimizer)), None)
        if computed is None or not gates.is_here(computed):
            return gradients
        return self.summed(computed, gradients)

    def after(self, step: ReplicaStep, logs: Any) -> None:
        if self._noted is None or not self.is_in_graph or _COMPUTED not in step.notes:
            return
        noted = [step.notes[name] for name in (_BEGUN, _COMPUTED, _SUMMED) if name in step.notes]
        if all(map(gates.is_here, noted)):
            self._noted.note(*noted)

    # How

    @staticmethod
    def _reading(
        step: ReplicaStep, optimizer: keras.optimizers.Optimizer, own: Sequence[Any]
    ) -> tuple[tf.Tensor, ...]:
        together = share.current()
        factor = tf.ones([])
        if together is not None:  # from this one's part in the mean over all samples to its own
            factor *= together.replicas
            if id(optimizer) in together.in_loss:
                factor = tf.math.divide_no_nan(factor, together.weight)
        if scales_loss(optimizer) and optimizer.built:
            factor /= tf.cast(optimizer.dynamic_scale, tf.float32)
        norm = factor * step.norm(own)
        loss = step.loss() if step.losses else tf.constant(math.nan)
        return step.samples(), loss, norm

    def begun(self, data: Any) -> tuple[Any, tf.Tensor]:
        """`data`, not before the time that is given beside it."""
        self._note_trace()
        tensors = _tensors_of(data)
        begun = _called(_now, tensors, _part_of(tensors[0]))
        with tf.control_dependencies([begun]):
            return tf.nest.map_structure(_identity, data, expand_composites=True), begun

    def _note_trace(self) -> None:
        if tf.inside_function():
            for heard in self._listeners:
                heard.traces += 1

    def computed(
        self,
        begun: tf.Tensor,
        own: Sequence[Any],
        reading: Sequence[tf.Tensor] = (),
        fingerprinted: Sequence[tf.Tensor] = (),
    ) -> tuple[list[Any], tf.Tensor]:
        """Notes a lap when the gradients `own` of this replica are all there.

        Args:
            begun: From `begun`.
            own: Gradients; None where a variable has none.
            reading: What a `Reading` consists of.
            fingerprinted: The arrays that make the fingerprint.

        Returns:
            The same gradients, of which one waits for that; and the time.
        """

        def note(part: Any, replica: Any, begun_s: Any, *others: Any) -> np.ndarray:
            read, arrays = others[: len(reading)], others[len(reading) :]
            return self._note(replica, begun_s, read, arrays)

        return _behind(note, own, _number(), begun, *reading, *fingerprinted)

    def summed(self, computed: tf.Tensor, summed: Sequence[Any]) -> list[Any]:
        """As `computed`, for the sums over all replicas: how long they came behind that."""

        def note(part: Any, replica: Any, computed_s: Any) -> np.ndarray:
            now_s = time.perf_counter()
            sync = Sync(int(replica), now_s - float(computed_s))
            for heard in self._listeners:
                heard.syncs.append(sync)
            return np.array(now_s)

        gradients, _ = _behind(note, summed, _number(), computed)
        return gradients

    def _note(
        self, replica: Any, begun_s: Any, reading: Sequence[Any], fingerprinted: Sequence[Any]
    ) -> np.ndarray:
        now_s = time.perf_counter()
        lap = Lap(
            int(replica),
            float(begun_s),
            now_s - float(begun_s),
            Reading(*(float(each) for each in reading)) if reading else None,
            fingerprint_of(fingerprinted) if fingerprinted else None,
        )
        for heard in self._listeners:
            heard.laps.append(lap)
        return np.array(now_s)


def fingerprint_of(arrays: Sequence[Any]) -> str:
    """Of their bytes; text as a pipeline has it, too."""
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


def _tensors_of(data: Any) -> list[tf.Tensor]:
    flat = tf.nest.flatten(data, expand_composites=True)
    return [each for each in flat if isinstance(each, tf.Tensor)]


def _number() -> Any:
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def _behind(
    note: Callable[..., np.ndarray], gradients: Sequence[Any], *arguments: Any
) -> tuple[list[Any], tf.Tensor]:
    """Has `note` called with a part of a gradient and `arguments` when all gradients are there."""
    present, place = _smallest_of(gradients)
    every = [dense(gradients[i]) for i in present]
    noted = _called(note, every, _part_of(dense(gradients[place])), *arguments)
    waiting = _only_behind(noted, gradients[place])
    return [*gradients[:place], waiting, *gradients[place + 1 :]], noted


def _smallest_of(gradients: Sequence[Any]) -> tuple[list[int], int]:
    """Returns the indices of all gradients, and of the smallest one."""
    present = [i for i, gradient in enumerate(gradients) if gradient is not None]
    return present, min(present, key=lambda i: size_of(gradients[i]))


def _when_there(gradients: Sequence[Any]) -> tuple[list[Any], tf.Tensor]:
    """Returns the gradients, one of which waits for the timestamp, and the timestamp."""
    present, place = _smallest_of(gradients)
    there = noted_times.now([dense(gradients[i]) for i in present], dense(gradients[place]))
    with tf.control_dependencies([there]):
        waiting = tf.nest.map_structure(_identity, gradients[place], expand_composites=True)
    return [*gradients[:place], waiting, *gradients[place + 1 :]], there


def _only_behind(stamp: tf.Tensor, gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = _only_behind(stamp, gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    # A control edge to what is an identity would be taken away with the call.
    return tf.where(stamp >= 0, gradient, tf.zeros_like(gradient))


def _called(
    function: Callable[..., np.ndarray], after: Sequence[tf.Tensor], *arguments: tf.Tensor
) -> tf.Tensor:
    with tf.control_dependencies(after):
        given = tf.numpy_function(function, arguments, tf.float64, stateful=False)
    return tf.reshape(given, [])


def _now(_: Any) -> np.ndarray:
    return np.array(time.perf_counter())


def _part_of(tensor: tf.Tensor) -> tf.Tensor:
    """Something small that is made of `tensor`: what has only constants to begin with would be
    called once, when the graph is made."""
    return tf.reshape(tensor, [-1])[:1]


def _identity(value: Any) -> Any:
    return tf.identity(value) if isinstance(value, tf.Tensor) else value
