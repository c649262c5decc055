"""Tensors with writable memory, for reading checkpoints and data without a copy.

TensorFlow 2.18 to 2.21: an eager tensor on the CPU shares its memory with NumPy, read-only, and
`assign` hands that memory over to the variable. Writing to it before the tensor is used elsewhere
is neither forbidden nor guaranteed to work, so a test checks the result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import tensorflow as tf


def empty_tensor(shape: Sequence[int], dtype: str) -> tuple[tf.Tensor, memoryview]:
    """Returns an uninitialized tensor and its memory, which is valid as long as the tensor lives.

    Args:
        shape: The shape, with at least one element.
        dtype: A dtype that NumPy supports, too.
    """
    with tf.device("CPU:0"):
        tensor = tf.raw_ops.Empty(shape=list(shape), dtype=dtype, init=False)
    lent = np.asarray(tensor)
    memory = (ctypes.c_ubyte * lent.nbytes).from_address(lent.ctypes.data)
    return tensor, memoryview(memory).cast("B")


def to_tensor(array: np.ndarray) -> tf.Tensor:
    """Copies the array into a tensor in host memory, once; `tf.constant` needs two copies."""
    if not array.size or array.dtype.kind in "USO":  # text
        return tf.constant(array)
    tensor, memory = empty_tensor(array.shape, array.dtype.name)
    np.frombuffer(memory, array.dtype).reshape(array.shape)[...] = array
    return tensor
