"""Convolutions of no samples: a replica gets none of a tail smaller than the number of replicas.

TensorFlow 2.18 to 2.21 with oneDNN (the default on x86): a convolution of an empty batch has its
input's shape instead of its own, and whatever comes behind it fails. A `reshape` does not help: the
shapes that graphs are optimized by are right, and it is optimized away.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import compute_output_spec
from keras.src.layers.convolutional.base_conv import BaseConv
from keras.src.layers.convolutional.base_depthwise_conv import BaseDepthwiseConv
from keras.src.layers.convolutional.base_separable_conv import BaseSeparableConv

from keras_distplug.compat.model import layers_of
from keras_distplug.compat.override import mark, override


def keep_shapes(model: keras.Model) -> None:
    """Gives convolutions of an empty batch the shape that they have of any other."""
    if not any("CPU" in device for device in model.distribute_strategy.extended.worker_devices):
        return
    for layer in layers_of(model):
        if isinstance(layer, BaseConv):
            method = "convolution_op"
        elif isinstance(layer, BaseDepthwiseConv | BaseSeparableConv):
            method = "call"
        else:
            continue
        if _shapes_get_lost() and mark(layer):
            override(layer, method, _skipped(getattr(layer, method)))


@cache
def _shapes_get_lost() -> bool:
    with tf.init_scope(), tf.device("CPU:0"):
        empty = tf.nn.conv2d(tf.zeros([0, 3, 3, 1]), tf.ones([2, 2, 1, 3]), 1, "VALID")
    return bool(empty.shape != (0, 2, 2, 3))


def _skipped(stock: Callable[..., Any]) -> Callable[..., Any]:
    def convolution(inputs: Any, *args: Any) -> Any:
        if not isinstance(inputs, tf.Tensor):
            return stock(inputs, *args)
        shape = compute_output_spec(stock, inputs, *args).shape[1:]
        if None in shape:
            return stock(inputs, *args)
        return tf.cond(
            tf.shape(inputs)[0] > 0,
            lambda: stock(inputs, *args),
            lambda: tf.zeros([0, *shape], inputs.dtype),
        )

    return convolution
