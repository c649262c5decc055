"""Times within a step, taken by each replica before it waits for the others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from keras_distplug.training.gradients import dense, size_of

_KEPT = 10_000  # laps that nobody takes


@dataclass(frozen=True)
class Lap:
    """What one replica did in a step.

    Args:
        replica: Its number among all replicas.
        begun_s: When its part of the batch was there, by `time.perf_counter`.
        compute_s: How long it took from there to its own gradients, before those of all are summed.
    """

    replica: int
    begun_s: float
    compute_s: float


class Stopwatch:
    """Takes times within a step.

    TensorFlow's own clock will not do: operations with a state wait for each other across the
    replicas of a process. A function of Python's without one is called when its inputs are there,
    and must give something that is needed, or it is left out.
    """

    def __init__(self) -> None:
        self._listeners: list[deque[Lap]] = []

    def listen(self) -> deque[Lap]:
        """Where laps come to stand from now on."""
        laps: deque[Lap] = deque(maxlen=_KEPT)
        self._listeners.append(laps)
        return laps

    def forget_listeners(self) -> None:
        self._listeners = []

    def begun(self, data: Any) -> tuple[Any, tf.Tensor]:
        """`data`, not before the time that is given beside it."""
        flat = [each for each in tf.nest.flatten(data, expand_composites=True) if _is_tensor(each)]
        begun = _called(_now, flat, _part_of(flat[0]))
        with tf.control_dependencies([begun]):
            return tf.nest.map_structure(_identity, data, expand_composites=True), begun

    def computed(self, begun: tf.Tensor, own: Sequence[Any]) -> list[Any]:
        """Notes a lap when the gradients `own` of this replica are all there. Gives the same ones,
        of which one waits for that."""
        present = [i for i, gradient in enumerate(own) if gradient is not None]
        place = min(present, key=lambda i: size_of(own[i]))
        every = [dense(own[i]) for i in present]
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        noted = _called(self._note, every, number, begun, _part_of(dense(own[place])))
        return [*own[:place], _only_behind(noted, own[place]), *own[place + 1 :]]

    def _note(self, replica: Any, begun_s: Any, _: Any) -> np.ndarray:
        now_s = time.perf_counter()
        lap = Lap(int(replica), float(begun_s), now_s - float(begun_s))
        for laps in self._listeners:
            laps.append(lap)
        return np.array(now_s)


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


def _is_tensor(value: Any) -> bool:
    return isinstance(value, tf.Tensor)


def _identity(value: Any) -> Any:
    return tf.identity(value) if _is_tensor(value) else value
