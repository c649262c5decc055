"""Masks updates, so that they change nothing, without a condition around them.

If operations within a condition are on parameter servers, TensorFlow 2.18 to 2.21 send a message
for every operation to say which branch was taken, which made a step take a third more CPU time.
Adding zeros avoids this.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf

from keras_distplug.backend.tensorflow.runtime.patching import Upstream

_UPSTREAM = Upstream(tensorflow="2.18 to 2.21")

_METHODS = ("assign", "assign_add", "assign_sub", "scatter_update", "scatter_add", "scatter_sub")


def knows(optimizer: keras.optimizers.Optimizer) -> bool:
    """True if the optimizer changes variables only through their methods. Custom optimizers may
    call TensorFlow operations instead."""
    is_of_keras = type(optimizer).__module__.partition(".")[0] == "keras"
    return is_of_keras and not hasattr(optimizer, "_inner_optimizers")


@contextmanager
def masked_updates(ok: tf.Tensor, variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Makes an update traced within the `with` block change `variables` only if `ok` is true.
    Variables whose values are replaced within the step are not affected."""
    held = {id(variable._value): variable._value for variable in variables}.values()
    natives = [value for value in held if isinstance(value, tf.Variable)]
    with ExitStack() as stack:
        for native, name in itertools.product(natives, _METHODS):
            stack.enter_context(_UPSTREAM.patched(native, name, _masked(native, name, ok)))
        yield


def _masked(native: tf.Variable, name: str, ok: tf.Tensor) -> Callable[..., Any]:
    stock = getattr(native, name)

    def method(value: Any, *args: Any, **kwargs: Any) -> Any:
        # On the variable's device: every tensor from another process costs a message, and `ok`
        # must be sent in any case.
        with tf.device(native.device):
            if isinstance(value, tf.IndexedSlices):
                before = tf.gather(native, value.indices) if name == "scatter_update" else 0
                values = tf.where(ok, value.values, before)
                value = tf.IndexedSlices(values, value.indices, value.dense_shape)
            else:
                value = tf.convert_to_tensor(value, native.dtype)
                value = tf.where(ok, value, native.read_value() if name == "assign" else 0)
        return stock(value, *args, **kwargs)

    return method
