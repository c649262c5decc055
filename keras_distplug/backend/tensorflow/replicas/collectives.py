"""Several MirroredStrategy objects in one process, as after a notebook's cell is run again.

TensorFlow 2.18 to 2.21: each of them numbers its collectives from 100 on, but TensorFlow remembers
the shape that a number had, so that a second strategy fails with "Shape mismatch in the collective
instance" and leaves no collective working.
"""

from __future__ import annotations

import itertools

import tensorflow as tf

from keras_distplug.backend.tensorflow.runtime.attached import mark

_NUMBERS_A_STRATEGY = 2**24  # a step takes about five
_STRATEGIES = 100  # numbers are 32 bits wide
_made = itertools.count()


def separate(strategy: tf.distribute.Strategy) -> None:
    """Gives the collectives of `strategy` numbers that no other strategy has."""
    if not isinstance(strategy, tf.distribute.MirroredStrategy) or not mark(strategy):
        return
    first = (1 + next(_made) % _STRATEGIES) * _NUMBERS_A_STRATEGY
    for numbers in strategy.extended._collective_keys._instance_key_table.values():
        for device in numbers:
            numbers[device] += first
