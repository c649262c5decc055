"""Gradients that are products, which TensorFlow reorders if only an optimizer uses them.

`SGD` uses a gradient once, multiplied by the learning rate. If the gradient is a product, too, such
as that of the scale of a `BatchNormalization`, TensorFlow (2.18 to 2.21, grappler's minimization of
broadcasts) multiplies the smallest factors first, unless anything else uses the product. That
changes the last bits. With copies for everything else, a step has the bits it has without
callbacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

_COPY = "_distplug_copy"  # an attribute, without which TensorFlow would merge copies and originals
_DEEPEST = 6  # levels of products within a product


def are_reordered(optimizer: keras.optimizers.Optimizer, gradients: Sequence[Any]) -> bool:
    """True if TensorFlow may multiply a gradient by the learning rate in another order."""
    # Keras' other optimizers use a gradient several times, so that nothing is reordered.
    return isinstance(optimizer, keras.optimizers.SGD) and any(map(is_product, gradients))


def copies(optimizer: keras.optimizers.Optimizer, gradients: Sequence[Any]) -> Sequence[Any]:
    """Returns the gradients for everything but the update."""
    if not are_reordered(optimizer, gradients):
        return gradients
    return [_copy(each) if is_product(each) else each for each in gradients]


def is_product(tensor: Any) -> bool:
    """True for a gradient that a step being traced computes as a product."""
    is_symbolic = isinstance(tensor, tf.Tensor) and not hasattr(tensor, "numpy")
    return is_symbolic and tensor.op.type == "Mul"


def _copy(product: tf.Tensor, depth: int = 1) -> tf.Tensor:
    """Copies a product, and the products that are its factors, up to a limit: they may share
    factors, which would be copied once for every path."""
    is_deepest = depth == _DEEPEST
    x, y = (
        _copy(each, depth + 1) if is_product(each) and not is_deepest else each
        for each in product.op.inputs
    )
    copied: tf.Tensor = tf.raw_ops.Mul(x=x, y=y)
    copied.op._set_attr(_COPY, tf.compat.v1.AttrValue(b=True))
    return copied
