"""Tensors with writable memory that a variable takes over."""

from __future__ import annotations

import gc

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from keras_distplug.backend.tensorflow.runtime.host_memory import empty_tensor  # noqa: E402
from keras_distplug.checkpoint import capture  # noqa: E402
from keras_distplug.storage.manifest import VariableSpec  # noqa: E402

DTYPES = ["float16", "float32", "float64", "int32", "int64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (700, 800)], ids=str)
def test_bits(dtype: str, shape: tuple[int, ...]) -> None:
    """A variable has, and computes with, the values written to the memory."""
    array = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    tensor, memory = empty_tensor(shape, dtype)
    memory[:] = array.reshape(-1).view(np.uint8).data
    variable = tf.Variable(tf.zeros(shape, dtype))
    variable.assign(tensor)
    del tensor, memory
    gc.collect()
    assert np.array_equal(variable.numpy(), array)
    variable.assign_add(tf.ones(shape, dtype))
    assert np.array_equal(variable.numpy(), array + 1)


def test_no_copy() -> None:
    """A Keras variable takes over the memory without a copy, which is the purpose."""
    spec = VariableSpec("x", (1024, 1024), "float32")
    memory = capture.allocate(spec)
    assert memory is not None
    memory.data[:] = np.full(spec.shape, 3, spec.dtype).view(np.uint8).reshape(-1).data
    variable = keras.Variable(np.zeros(spec.shape, spec.dtype))
    variable.assign(memory.value)
    there = np.asarray(variable.value.read_value()).ctypes.data
    assert there == np.frombuffer(memory.data, np.uint8).ctypes.data
    assert np.array_equal(np.asarray(variable.value), np.full(spec.shape, 3, spec.dtype))


def test_tensor_is_not_changed() -> None:
    """A change of the variable does not change the tensor whose memory it has taken over."""
    tensor, memory = empty_tensor((600, 600), "float32")
    memory[:] = bytes(len(memory))
    variable = tf.Variable(tf.ones((600, 600)))
    variable.assign(tensor)
    variable.assign_add(tf.ones((600, 600)))
    assert float(tf.reduce_max(tensor)) == 0.0
