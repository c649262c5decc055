"""Times that the only replica of a process notes in the graph, which calls no Python for them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf

from keras_distplug.backend.tensorflow.replicas.touched import leave_out

KEPT = 4096  # steps whose times nobody takes
NOT_NOTED = -1.0  # no NaN, which `tf.debugging.enable_check_numerics` would take for a fault
_SAME_S = 0.001
_AT_ONCE_S, _TRIES = 0.00005, 5


class NotedTimes:
    """The times of each step, by `time.time`.

    TensorFlow's clock is an operation with a state, and those wait for each other across the
    replicas of a process; so there must be only one.
    """

    def __init__(self) -> None:
        if tf.distribute.has_strategy():
            # A scope, which is that of a thread, would make these variables the strategy's.
            with ThreadPoolExecutor(1) as pool:
                pool.submit(self._make).result()
        else:
            self._make()
        self._taken, self._offset_s = 0, _offset_s()

    def _make(self) -> None:
        with tf.device("CPU:0"):
            self._count = leave_out(tf.Variable(0, dtype=tf.int64, trainable=False))
            times = tf.zeros([KEPT, 3], tf.float64)
            self._times = leave_out(tf.Variable(times, trainable=False))

    def note(self, *times: tf.Tensor) -> None:
        """Up to three of a step that is being traced, by `now`."""
        missing = tf.constant(NOT_NOTED, tf.float64)
        with tf.device("CPU:0"):
            row = tf.stack([*times, *[missing] * (3 - len(times))])
            # Where the data have ended, there is none.
            with tf.control_dependencies([row]):
                count = self._count.read_value()
                self._times.scatter_nd_update([[count % KEPT]], [row])
                self._count.assign(count + 1)

    def take(self) -> np.ndarray:
        """Rows of three for the steps since the last call, by `time.perf_counter`; none where the
        clock was set since."""
        count = int(self._count.numpy())
        new = min(count - self._taken, KEPT)
        self._taken = count
        before_s, self._offset_s = self._offset_s, _offset_s()
        if not new or abs(self._offset_s - before_s) > _SAME_S:
            return np.empty([0, 3])
        rows: np.ndarray = self._times.numpy()[np.arange(count - new, count) % KEPT]
        return np.where(rows == NOT_NOTED, NOT_NOTED, rows + self._offset_s)


def now(after: Sequence[tf.Tensor], last: tf.Tensor) -> tf.Tensor:
    """The time at which `after` are computed, and `last`, of which a part comes to the CPU: of what
    is on a GPU it is only known that its kernel was started."""
    with tf.control_dependencies(after):
        part = tf.reshape(last, [-1])[:1]
        with tf.device("CPU:0"), tf.control_dependencies([tf.identity(part)]):
            return tf.timestamp()


def _offset_s() -> float:
    """From `time.time` to `time.perf_counter`, which are not read at once where others compute."""
    tries = []
    for _ in range(_TRIES):
        begun_s, now_s, ended_s = time.perf_counter(), time.time(), time.perf_counter()
        tries.append((ended_s - begun_s, begun_s - now_s))
        if ended_s - begun_s < _AT_ONCE_S:
            break
    return min(tries)[1]
