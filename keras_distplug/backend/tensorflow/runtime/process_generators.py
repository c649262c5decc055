"""Generators that TensorFlow keeps for a process.

TensorFlow 2.18 to 2.21 has no means to take the state of the one that gives seeds to random
operations outside of functions, nor to ask for its global generator without making one.
"""

from __future__ import annotations

import random
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.ops import stateful_random_ops


def operation_seeds() -> random.Random | None:
    """What gives random operations their seeds; None without `tf.random.set_seed`."""
    return getattr(context.context(), "_rng", None)


def global_generator() -> tf.random.Generator | None:
    """`tf.random.get_global_generator()`, if somebody has asked for it."""
    return stateful_random_ops.global_generator


def set_global_generator(state: Any, algorithm: int) -> None:
    made = tf.random.Generator.from_state(state, algorithm)
    if (generator := global_generator()) is not None:
        generator.reset(made.state)
    else:
        tf.random.set_global_generator(made)
