"""Timestamps of a step, recorded in the graph without calling Python."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf

from keras_distplug.backend.tensorflow.replicas.touched import exclude_variable

KEPT = 4096  # steps between two calls of `take`
NOT_RECORDED = -1.0  # not NaN, which `tf.debugging.enable_check_numerics` would report
_SAME_S = 0.001
_PROMPT_S, _TRIES = 0.00005, 5


class RecordedTimes:
    """The times of every step, by the clock of `time.time`.

    TensorFlow's timestamp operation is stateful, and stateful operations wait for each other across
    the replicas of a process. This class therefore requires a single replica per process.
    """

    def __init__(self) -> None:
        if tf.distribute.has_strategy():
            # In a strategy's scope, which is per thread, these would be distributed variables.
            with ThreadPoolExecutor(1) as pool:
                pool.submit(self._make).result()
        else:
            self._make()
        self._taken, self._offset_s = 0, _offset_s()

    def _make(self) -> None:
        with tf.device("CPU:0"):
            count = tf.zeros([1, 1], tf.int64)
            self._count = exclude_variable(tf.Variable(count, trainable=False))
            times = tf.zeros([KEPT, 3], tf.float64)
            self._times = exclude_variable(tf.Variable(times, trainable=False))

    def record(self, *times: tf.Tensor) -> None:
        """Records up to three times from `now`, in the step that is being traced."""
        missing = tf.constant(NOT_RECORDED, tf.float64)
        with tf.device("CPU:0"):
            row = tf.stack([*times, *[missing] * (3 - len(times))])
            # Not computed if the data has ended.
            with tf.control_dependencies([row]):
                place = self._count.read_value() % KEPT
                self._times.scatter_nd_update(place, [row])
                self._count.assign_add([[1]], read_value=False)

    def take(self) -> np.ndarray:
        """Returns a row of three times per step since the last call, by `time.perf_counter`; no
        rows if the system clock was changed meanwhile."""
        count = int(self._count.numpy().item())
        new = min(count - self._taken, KEPT)
        self._taken = count
        before_s, self._offset_s = self._offset_s, _offset_s()
        if not new or abs(self._offset_s - before_s) > _SAME_S:
            return np.empty([0, 3])
        rows: np.ndarray = self._times.numpy()[np.arange(count - new, count) % KEPT]
        return np.where(rows == NOT_RECORDED, NOT_RECORDED, rows + self._offset_s)


def now(after: Sequence[tf.Tensor], last: tf.Tensor) -> tf.Tensor:
    """Returns the time at which all of `after`, and `last`, are computed.

    Where there are other devices than CPUs, one value of `last` is copied to the CPU: on a GPU, a
    control dependency alone only waits until the kernel has been launched.
    """
    if all(device.device_type == "CPU" for device in tf.config.list_logical_devices()):
        with tf.device("CPU:0"), tf.control_dependencies([*after, last]):
            return tf.timestamp()
    with tf.control_dependencies(after):
        part = tf.reshape(last, [-1])[:1]
        with tf.device("CPU:0"), tf.control_dependencies([tf.identity(part)]):
            return tf.timestamp()


def _offset_s() -> float:
    """Returns `time.perf_counter() - time.time()`. Retries, because the process may be descheduled
    between the two reads."""
    tries = []
    for _ in range(_TRIES):
        start_s, now_s, end_s = time.perf_counter(), time.time(), time.perf_counter()
        tries.append((end_s - start_s, start_s - now_s))
        if end_s - start_s < _PROMPT_S:
            break
    return min(tries)[1]
