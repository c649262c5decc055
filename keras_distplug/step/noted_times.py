"""Times that the only replica of a process notes in the graph, which calls no Python for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf

from keras_distplug.backend.tensorflow.replicas.touched import leave_out

KEPT = 4096  # steps whose times nobody takes


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
        self._taken = 0

    def _make(self) -> None:
        with tf.device("CPU:0"):
            self._count = leave_out(tf.Variable(0, dtype=tf.int64, trainable=False))
            times = tf.zeros([KEPT, 3], tf.float64)
            self._times = leave_out(tf.Variable(times, trainable=False))

    def note(self, *times: tf.Tensor) -> None:
        """Up to three of a step that is being traced, by `now`."""
        missing = tf.constant(math.nan, tf.float64)
        row = tf.stack([*times, *[missing] * (3 - len(times))])
        # Where the data have ended, there is none.
        with tf.control_dependencies([row]), tf.device("CPU:0"):
            count = self._count.read_value()
            self._times.scatter_nd_update([[count % KEPT]], [row])
            self._count.assign(count + 1)

    def take(self) -> np.ndarray:
        """Rows of three for the steps since the last call, and NaN for what was not noted."""
        count = int(self._count.numpy())
        new = min(count - self._taken, KEPT)
        self._taken = count
        rows: np.ndarray = self._times.numpy()[np.arange(count - new, count) % KEPT]
        return rows


def now(after: Sequence[tf.Tensor], last: tf.Tensor) -> tf.Tensor:
    """The time at which `after` are computed, and `last`, of which a part comes to the CPU: of what
    is on a GPU it is only known that its kernel was started."""
    with tf.control_dependencies(after), tf.device("CPU:0"):
        part = tf.identity(tf.reshape(last, [-1])[:1])
        with tf.control_dependencies([part]):
            return tf.timestamp()
