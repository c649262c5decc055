"""How far a loss, or a gradient's norm, is from those before it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from keras_distplug.backend.tensorflow.replicas.touched import leave_out

WINDOW = 128
_ENOUGH = 32
_LEAST_SPREAD = 0.1  # a tenth more or less is none


class Window:
    """What the last updates of one optimizer had of something, as one replica keeps it.

    The score of a value is a robust z-score: the value less the median of those in the window, in
    units of their median absolute deviation times 1.4826, which is the standard deviation of what
    is normally distributed (Iglewicz and Hoaglin, 1993, "How to Detect and Handle Outliers").

    Args:
        by_logarithm: Whether that is asked of the logarithms, as for norms, which are never below
            0, and may differ by orders of magnitude.
    """

    def __init__(self, *, by_logarithm: bool) -> None:
        self._by_logarithm = by_logarithm
        self._values = leave_out(tf.Variable(tf.zeros([WINDOW]), trainable=False))
        self._count = leave_out(tf.Variable(0, trainable=False))

    def score(self, value: tf.Tensor) -> tf.Tensor:
        """0 while there are too few to tell."""
        count = self._count.read_value()
        values = self._values.read_value()
        # Places that are still free go to the end.
        known = tf.sort(tf.where(tf.range(WINDOW) < count, values, math.inf))
        many = tf.minimum(count, WINDOW)
        median = _middle(known, many)
        deviations = tf.sort(tf.where(tf.math.is_finite(known), tf.abs(known - median), math.inf))
        size = 1.0 if self._by_logarithm else tf.reduce_max(tf.abs(values))
        spread = tf.maximum(1.4826 * _middle(deviations, many), _LEAST_SPREAD * size)
        # Behind nothing but zeros, nobody knows how much is much.
        is_known = (count >= _ENOUGH) & (spread > 0)
        return tf.where(is_known, (self._kept(value) - median) / spread, 0.0)

    def learn_if(self, ok: tf.Tensor, value: tf.Tensor) -> None:
        """Takes `value` into the window, in place of the oldest one, if `ok`."""
        count = self._count.read_value()
        is_its_place = tf.range(WINDOW) == count % WINDOW
        values = self._values.read_value()
        self._values.assign(tf.where(is_its_place & ok, self._kept(value), values))
        self._count.assign(count + tf.cast(ok, tf.int32))

    def state(self) -> list[float]:
        """What is kept, the oldest first."""
        count = int(self._count)
        values = [float(each) for each in self._values.numpy()]
        start = count % WINDOW if count > WINDOW else 0
        return (values[start:] + values[:start])[: min(count, WINDOW)]

    def set_state(self, values: Sequence[float]) -> None:
        self._values.assign([*values, *[0.0] * (WINDOW - len(values))])
        self._count.assign(len(values))

    def _kept(self, value: tf.Tensor) -> tf.Tensor:
        value = tf.cast(value, tf.float32)
        return tf.math.log(tf.maximum(value, 1e-30)) if self._by_logarithm else value


def _middle(ordered: tf.Tensor, many: tf.Tensor) -> tf.Tensor:
    return ordered[tf.maximum(many - 1, 0) // 2]
