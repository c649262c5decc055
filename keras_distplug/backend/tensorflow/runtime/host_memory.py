"""A tensor whose memory can be written to, for reading checkpoints and data without a copy.

TensorFlow 2.18 to 2.21: an eager tensor on the CPU lends its memory to NumPy, read-only; `assign`
makes it the variable's. Writing to it before anyone else has seen the tensor is what nobody
forbids, and nobody promises: a test compares.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import tensorflow as tf


def empty_tensor(shape: Sequence[int], dtype: str) -> tuple[tf.Tensor, memoryview]:
    """A tensor with anything in it, and its bytes, which are there as long as the tensor.

    Args:
        shape: Of at least one element.
        dtype: A type that NumPy has, too.
    """
    with tf.device("CPU:0"):
        tensor = tf.raw_ops.Empty(shape=list(shape), dtype=dtype, init=False)
    lent = np.asarray(tensor)
    memory = (ctypes.c_ubyte * lent.nbytes).from_address(lent.ctypes.data)
    return tensor, memoryview(memory).cast("B")


def to_tensor(array: np.ndarray) -> tf.Tensor:
    """The array in host memory, once; `tf.constant` holds two copies."""
    if not array.size or array.dtype.kind in "USO":  # text
        return tf.constant(array)
    tensor, memory = empty_tensor(array.shape, array.dtype.name)
    np.frombuffer(memory, array.dtype).reshape(array.shape)[...] = array
    return tensor
