"""TensorFlow's random generators of the process.

TensorFlow 2.18 to 2.21 have no API to read the state of the generator that seeds random operations
outside functions, nor to get the global generator without creating one.
"""

from __future__ import annotations

import random
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.ops import stateful_random_ops


def operation_seeds() -> random.Random | None:
    """Returns the generator that seeds random operations; None without `tf.random.set_seed`."""
    return getattr(context.context(), "_rng", None)


def global_generator() -> tf.random.Generator | None:
    """Returns TensorFlow's global generator; None if it has not been created yet."""
    return stateful_random_ops.global_generator


def set_global_generator(state: Any, algorithm: int) -> None:
    made = tf.random.Generator.from_state(state, algorithm)
    if (generator := global_generator()) is not None:
        generator.reset(made.state)
    else:
        tf.random.set_global_generator(made)
