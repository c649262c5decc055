"""The tensors that a tf.data pipeline holds. TensorFlow 2.18 to 2.21."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from keras_distplug.backend.tensorflow.input.pipeline_steps import Step, arguments_of

# Their tensors are data or names of files, as are what functions of other transformations refer to.
_HOLDING = re.compile(
    r"Tensor(Slice)?Dataset|SparseTensorSliceDataset|MatchingFilesDataset|CSVDataset(V\d)?"
    r"|(TFRecord|TextLine|FixedLengthRecord)Dataset(V\d)?"
)
_REFERRED = "other_arguments"
_LEAST_ELEMENTS = 16


def constants_of(
    steps: Iterable[Step], graph: graph_pb2.GraphDef, held: Mapping[str, tf.Tensor]
) -> list[tf.Tensor]:
    """Returns the tensors that elements are made of, and the names of files.

    Args:
        steps: Of the pipeline.
        graph: Its graph.
        held: Values of constants that the graph has no more.
    """
    by_name = {node.name: node for node in graph.node}
    names = [
        name
        for step in steps
        for argument, read in arguments_of(by_name[step.node])
        if _HOLDING.fullmatch(step.op) or argument.name == _REFERRED
        for name in read
        if name in by_name and by_name[name].op == "Const"
    ]
    values = [_value_of(by_name[name], held) for name in dict.fromkeys(names)]
    # Their order in the graph is that of names that TensorFlow counts up.
    values += sorted(_arrays_in(graph), key=_bytes)
    return [each if each.shape.rank else each[tf.newaxis] for each in values if each is not None]


def _arrays_in(graph: graph_pb2.GraphDef) -> Iterator[tf.Tensor]:
    """NumPy arrays that functions refer to, as far as they are large enough to be data."""
    for function in graph.library.function:
        for node in function.node_def:
            if node.op == "Const":
                dims = node.attr["value"].tensor.tensor_shape.dim
                if dims and math.prod(dim.size for dim in dims) >= _LEAST_ELEMENTS:
                    yield _value_of(node, {})


def _bytes(tensor: tf.Tensor) -> bytes:
    found: bytes = tf.io.serialize_tensor(tensor).numpy()
    return found


def _value_of(constant: Any, held: Mapping[str, tf.Tensor]) -> tf.Tensor | None:
    value = constant.attr["value"].tensor
    if value.dtype == tf.variant.as_datatype_enum:  # of ragged and sparse tensors
        return None
    found = held.get(constant.name)
    return tf.io.parse_tensor(value.SerializeToString(), value.dtype) if found is None else found
