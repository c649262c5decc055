"""Scores of a loss or gradient norm, compared with previous ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from keras_distplug.backend.tensorflow.replicas.touched import exclude_variable

WINDOW = 128
_ENOUGH = 32
_LEAST_SPREAD = 0.1  # ignore differences of a tenth


class Window:
    """A window of one quantity over the last updates of an optimizer, stored on one replica.

    The score of a value is a robust z-score: its distance from the median of the window, in units
    of the median absolute deviation times 1.4826, which for a normal distribution is the standard
    deviation (Iglewicz and Hoaglin, 1993, "How to Detect and Handle Outliers").

    Args:
        by_logarithm: If `True`, the scores are those of logarithms, which suits norms: they are
            never negative and may differ by orders of magnitude.
    """

    def __init__(self, *, by_logarithm: bool) -> None:
        self._by_logarithm = by_logarithm
        self._values = exclude_variable(tf.Variable(tf.zeros([WINDOW]), trainable=False))
        self._count = exclude_variable(tf.Variable(0, trainable=False))

    def score(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the score of `value`; 0 while the window has too few values."""
        count = self._count.read_value()
        values = self._values.read_value()
        # Sort free places to the end.
        known = tf.sort(tf.where(tf.range(WINDOW) < count, values, math.inf))
        many = tf.minimum(count, WINDOW)
        median = _median(known, many)
        deviations = tf.sort(tf.where(tf.math.is_finite(known), tf.abs(known - median), math.inf))
        size = 1.0 if self._by_logarithm else tf.reduce_max(tf.abs(values))
        spread = tf.maximum(1.4826 * _median(deviations, many), _LEAST_SPREAD * size)
        # After nothing but zeros, the scale of values is unknown.
        is_meaningful = (count >= _ENOUGH) & (spread > 0)
        return tf.where(is_meaningful, (self._transformed(value) - median) / spread, 0.0)

    def learn_if(self, ok: tf.Tensor, value: tf.Tensor) -> None:
        """Adds `value` to the window, replacing the oldest one, if `ok`."""
        count = self._count.read_value()
        is_oldest = tf.range(WINDOW) == count % WINDOW
        values = self._values.read_value()
        self._values.assign(tf.where(is_oldest & ok, self._transformed(value), values))
        self._count.assign(count + tf.cast(ok, tf.int32))

    def state(self) -> list[float]:
        """Returns the values in the window, oldest first."""
        count = int(self._count)
        values = [float(each) for each in self._values.numpy()]
        start = count % WINDOW if count > WINDOW else 0
        return (values[start:] + values[:start])[: min(count, WINDOW)]

    def set_state(self, values: Sequence[float]) -> None:
        self._values.assign([*values, *[0.0] * (WINDOW - len(values))])
        self._count.assign(len(values))

    def _transformed(self, value: tf.Tensor) -> tf.Tensor:
        value = tf.cast(value, tf.float32)
        return tf.math.log(tf.maximum(value, 1e-30)) if self._by_logarithm else value


def _median(ordered: tf.Tensor, many: tf.Tensor) -> tf.Tensor:
    return ordered[tf.maximum(many - 1, 0) // 2]
