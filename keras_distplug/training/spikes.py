"""How far a gradient's norm is from those before it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

WINDOW = 128
_ENOUGH = 32
_LEAST_SPREAD = 0.1  # of a logarithm: a tenth more or less is none


class Norms:
    """The gradient norms of the last updates of one optimizer, as one replica keeps them.

    The score of a norm is a robust z-score: its logarithm less the median of those in the window,
    in units of their median absolute deviation times 1.4826, which is the standard deviation of
    what is normally distributed (Iglewicz and Hoaglin, 1993, "How to Detect and Handle Outliers").
    """

    def __init__(self) -> None:
        self._logs = tf.Variable(tf.zeros([WINDOW]), trainable=False)
        self._count = tf.Variable(0, trainable=False)

    def score(self, norm: tf.Tensor) -> tf.Tensor:
        """0 while there are too few to tell."""
        count = self._count.read_value()
        logs = self._logs.read_value()
        # Places that are still free go to the end.
        known = tf.sort(tf.where(tf.range(WINDOW) < count, logs, math.inf))
        many = tf.minimum(count, WINDOW)
        median = _middle(known, many)
        deviations = tf.sort(tf.where(tf.math.is_finite(known), tf.abs(known - median), math.inf))
        spread = tf.maximum(1.4826 * _middle(deviations, many), _LEAST_SPREAD)
        return tf.where(count >= _ENOUGH, (_log(norm) - median) / spread, 0.0)

    def learn_if(self, ok: tf.Tensor, norm: tf.Tensor) -> None:
        """Takes `norm` into the window, in place of the oldest one, if `ok`."""
        count = self._count.read_value()
        is_its_place = tf.range(WINDOW) == count % WINDOW
        logs = self._logs.read_value()
        self._logs.assign(tf.where(is_its_place & ok, _log(norm), logs))
        self._count.assign(count + tf.cast(ok, tf.int32))

    def state(self) -> list[float]:
        """The logarithms, the oldest first."""
        count = int(self._count)
        logs = [float(each) for each in self._logs.numpy()]
        start = count % WINDOW if count > WINDOW else 0
        return (logs[start:] + logs[:start])[: min(count, WINDOW)]

    def set_state(self, logs: Sequence[float]) -> None:
        self._logs.assign([*logs, *[0.0] * (WINDOW - len(logs))])
        self._count.assign(len(logs))


def _log(norm: tf.Tensor) -> tf.Tensor:
    return tf.math.log(tf.maximum(tf.cast(norm, tf.float32), 1e-30))


def _middle(ordered: tf.Tensor, many: tf.Tensor) -> tf.Tensor:
    return ordered[tf.maximum(many - 1, 0) // 2]
