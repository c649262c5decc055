"""Allows several MirroredStrategy objects in one process, as after re-running a notebook cell.

TensorFlow 2.18 to 2.21: every strategy numbers its collectives from 100 on, but TensorFlow keeps
the shape used with a number. A second strategy therefore fails with "Shape mismatch in the
collective instance", after which no collective works any more.
"""

from __future__ import annotations

import itertools

import tensorflow as tf

from keras_distplug.backend.tensorflow.runtime.attached import mark

_NUMBERS_A_STRATEGY = 2**24  # a step uses about five
_STRATEGIES = 100  # numbers are 32 bits wide
_made = itertools.count()


def separate(strategy: tf.distribute.Strategy) -> None:
    """Gives the collectives of `strategy` numbers that no other strategy uses."""
    if not isinstance(strategy, tf.distribute.MirroredStrategy) or not mark(strategy):
        return
    first = (1 + next(_made) % _STRATEGIES) * _NUMBERS_A_STRATEGY
    for numbers in strategy.extended._collective_keys._instance_key_table.values():
        for device in numbers:
            numbers[device] += first
