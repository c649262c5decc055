"""Variables and tables used by the functions of a tf.data pipeline."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from keras_distplug.backend.tensorflow.input.pipeline_steps import get_arguments, is_dataset


@dataclass(frozen=True)
class Variable:
    """A variable used by functions of a pipeline, regardless of its creator."""

    handle: tf.Tensor

    @property
    def dtype(self) -> tf.DType:
        return tf.as_dtype(self._shape_data.dtype)

    @property
    def nbytes(self) -> int:
        elements: int = tf.TensorShape(self._shape_data.shape).num_elements() or 0
        return elements * int(self.dtype.size)

    @property
    def _shape_data(self) -> Any:
        return self.handle._handle_data.shape_and_type[0]

    def read(self) -> np.ndarray:
        with tf.device(self.handle.device):
            value = tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)
        return np.asarray(value)

    def assign(self, value: Any) -> None:
        with tf.device(self.handle.device):
            given = tf.constant(np.asarray(value), self.dtype)
            tf.raw_ops.AssignVariableOp(resource=self.handle, value=given)


def find_resources(
    graph: graph_pb2.GraphDef, functions: Mapping[str, Any]
) -> dict[str, dict[str, tf.Tensor]]:
    """Returns the variables, tables and other resources that `functions` use: for every op of the
    graph, by the nodes that create copies of them. TensorFlow serializes the resources' values, not
    their identities."""
    captured = {name: each.function.captured_inputs for name, each in functions.items()}
    found: dict[str, dict[str, tf.Tensor]] = {}
    for node in graph.node:
        called = {name: value.func.name for name, value in node.attr.items() if value.func.name}
        for attribute, function in called.items() if is_dataset(node) else ():
            if function in captured:
                given = _get_arguments(node, attribute if len(called) > 1 else "")
                pairs = zip(given, captured[function], strict=True)
                own = {name: tensor for name, tensor in pairs if tensor.dtype == tf.resource}
                found.setdefault(node.name, {}).update(own)
    return found


def is_variable(handle: tf.Tensor) -> bool:
    shape_data = getattr(handle, "_handle_data", None)
    return shape_data is not None and len(shape_data.shape_and_type) == 1


def _get_arguments(node: Any, function: str) -> list[str]:
    """Returns the nodes that an op passes to its function in this attribute, or only one ("")."""
    pattern = re.compile(rf"{function or '.*'}_?other_arg(ument)?s")
    read = (nodes for each, nodes in get_arguments(node) if pattern.fullmatch(each.name))
    return list(chain.from_iterable(read))
