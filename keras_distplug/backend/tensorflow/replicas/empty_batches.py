"""Convolutions and pooling of empty batches, which a replica gets if the last batch is smaller than
the number of replicas.

TensorFlow 2.18 to 2.21 with oneDNN (the default on x86 with AVX-512): the result of a convolution
of an empty batch has the shape of its input, and the operations that use it fail. A `reshape` does
not help: the graph optimizer knows the correct shape and removes it. The gradient of max pooling of
an empty batch aborts the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import Any

import tensorflow as tf

from keras_distplug.backend.tensorflow.replicas.share import current
from keras_distplug.backend.tensorflow.runtime import private_names
from keras_distplug.backend.tensorflow.runtime.current import Current
from keras_distplug.backend.tensorflow.runtime.patching import Upstream

_UPSTREAM = Upstream(tensorflow="2.18 to 2.21")

_OPERATIONS = ("conv", "depthwise_conv", "separable_conv", "conv_transpose", "max_pool")


@contextmanager
def patched_operations(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Lets Keras' operations accept empty batches while a step of several replicas is traced or
    run.

    This covers layers and `keras.ops`, but not direct calls of `tf.nn`. Steps on a single device,
    in other threads, are not affected.
    """
    with ExitStack() as stack:
        for name in _OPERATIONS if need_patches(strategy) else ():
            stock = getattr(private_names.nn, name)
            stack.enter_context(_UPSTREAM.patched(private_names.nn, name, _accept_any_batch(stock)))
        yield


def need_patches(strategy: tf.distribute.Strategy) -> bool:
    """True if operations on empty batches give wrong results and need the patches."""
    on_cpu = any("CPU" in device for device in strategy.extended.worker_devices)
    return on_cpu and _shapes_get_lost()


@cache
def _shapes_get_lost() -> bool:
    with tf.init_scope(), tf.device("CPU:0"):
        empty = tf.nn.conv2d(tf.zeros([0, 3, 3, 1]), tf.ones([2, 2, 1, 3]), 1, "VALID")
    return bool(empty.shape != (0, 2, 2, 3))


_operation: Current[str] = Current()  # the outermost one: one operation may call another


def _accept_any_batch(stock: Callable[..., Any]) -> Callable[..., Any]:
    choose = _choose_tensors if stock.__name__ == "max_pool" else _choose_operation

    @wraps(stock)
    def operation(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        context = tf.distribute.get_replica_context()
        one = context is None or context.num_replicas_in_sync == 1
        if one or _operation.now or not isinstance(inputs, tf.Tensor):
            return stock(inputs, *args, **kwargs)
        with _operation.at(stock.__name__):
            return choose(_has_samples(inputs), lambda some: stock(some, *args, **kwargs), inputs)

    return operation


def _has_samples(inputs: tf.Tensor) -> tf.Tensor:
    share = current()
    # Not in a layer's own `tf.function`, which outlives this trace.
    if share is not None and (
        tf.executing_eagerly() or tf.compat.v1.get_default_graph() is share.has_samples.graph
    ):
        return share.has_samples
    return tf.shape(inputs)[0] > 0


def _choose_operation(
    has_samples: tf.Tensor, compute: Callable[[tf.Tensor], Any], inputs: tf.Tensor
) -> tf.Tensor:
    return tf.cond(
        has_samples,
        lambda: compute(inputs),
        lambda: compute(_zeros_of_one(inputs))[:0],
    )


def _choose_tensors(
    has_samples: tf.Tensor, compute: Callable[[tf.Tensor], Any], inputs: tf.Tensor
) -> tf.Tensor:
    """Chooses between tensors instead of operations.

    Inside a condition, TensorFlow does not use the fast gradient of max pooling, which makes a
    small network's step take 1.5 times as long. Convolutions are slightly faster inside.
    """
    outputs = compute(tf.cond(has_samples, lambda: inputs, lambda: _zeros_of_one(inputs)))
    return tf.cond(has_samples, lambda: outputs, lambda: outputs[:0])


def _zeros_of_one(inputs: tf.Tensor) -> tf.Tensor:
    shape = tf.concat([[1], tf.shape(inputs)[1:]], axis=0)
    return tf.ensure_shape(tf.zeros(shape, inputs.dtype), [1, *inputs.shape[1:]])
