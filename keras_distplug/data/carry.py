"""Carries data across a restart of TensorFlow in the process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_distplug.backend.tensorflow.input import readers
from keras_distplug.core.errors import DataError


def pack(values: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    """Reads `values` before the restart of TensorFlow.

    Args:
        values: Arguments by name: datasets, arrays, tensors, `PyDataset`s, functions, nests of
            those, or values that do not depend on TensorFlow.

    Returns:
        A function that returns them after the restart.

    Raises:
        DataError: If one cannot be carried over.
    """
    packed = {
        name: keras.tree.map_structure(functools.partial(_pack_one, name), value)
        for name, value in values.items()
    }
    return lambda: {
        name: keras.tree.map_structure(lambda part: part(), parts) for name, parts in packed.items()
    }


def _pack_one(name: str, part: Any) -> Callable[[], Any]:
    if isinstance(part, tf.data.Dataset):
        try:
            saved = readers.to_graph(part)
        except tf.errors.OpError as error:
            raise _cannot_carry(name, error.message) from error
        if ops := readers.python_ops(saved):
            raise _cannot_carry(name, f"it calls Python code ({', '.join(sorted(ops))})")
        return lambda: readers.from_graph(saved)
    if isinstance(part, tf.Tensor | tf.Variable | keras.Variable):
        array: np.ndarray = np.asarray(part.numpy())
        return lambda: array
    return lambda: part


def _cannot_carry(name: str, why: str) -> DataError:
    return DataError(
        f"The dataset `{name}` was created before this process joined the cluster, and cannot be "
        f"transferred: {why}. Either call `keras_distplug.init()` at the top of the script, before "
        "any model, tensor or dataset is created, or pass a function that creates the dataset: "
        f"`distributed_fit(model, {name}=make_{name}, ...)`."
    )
