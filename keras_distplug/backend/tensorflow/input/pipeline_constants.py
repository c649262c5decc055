"""The tensors contained in a tf.data pipeline. TensorFlow 2.18 to 2.21."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from keras_distplug.backend.tensorflow.input.pipeline_steps import Step, get_arguments

# The tensors of these ops are data or file names, and so are those captured by functions of other
# transformations.
_HOLDING = re.compile(
    r"Tensor(Slice)?Dataset|SparseTensorSliceDataset|MatchingFilesDataset|CSVDataset(V\d)?"
    r"|(TFRecord|TextLine|FixedLengthRecord)Dataset(V\d)?"
)
_REFERRED = "other_arguments"
_LEAST_ELEMENTS = 16


def find_constants(
    steps: Iterable[Step], graph: graph_pb2.GraphDef, held: Mapping[str, tf.Tensor]
) -> list[tf.Tensor]:
    """Returns the tensors that elements are made of, and the names of files.

    Args:
        steps: The steps of the pipeline.
        graph: The graph of the pipeline.
        held: The values of constants that were removed from the graph.
    """
    by_name = {node.name: node for node in graph.node}
    names = [
        name
        for step in steps
        for argument, read in get_arguments(by_name[step.node])
        if _HOLDING.fullmatch(step.op) or argument.name == _REFERRED
        for name in read
        if name in by_name and by_name[name].op == "Const"
    ]
    values = [_get_value(by_name[name], held) for name in dict.fromkeys(names)]
    # Sorted, because their order in the graph depends on counters in TensorFlow's names.
    values += sorted(_find_arrays(graph), key=_serialize)
    return [each if each.shape.rank else each[tf.newaxis] for each in values if each is not None]


def _find_arrays(graph: graph_pb2.GraphDef) -> Iterator[tf.Tensor]:
    """Yields NumPy arrays captured by functions that are large enough to be data."""
    for function in graph.library.function:
        for node in function.node_def:
            if node.op == "Const":
                dims = node.attr["value"].tensor.tensor_shape.dim
                if dims and math.prod(dim.size for dim in dims) >= _LEAST_ELEMENTS:
                    yield _get_value(node, {})


def _serialize(tensor: tf.Tensor) -> bytes:
    found: bytes = tf.io.serialize_tensor(tensor).numpy()
    return found


def _get_value(constant: Any, held: Mapping[str, tf.Tensor]) -> tf.Tensor | None:
    value = constant.attr["value"].tensor
    if value.dtype == tf.variant.as_datatype_enum:  # a ragged or sparse tensor
        return None
    found = held.get(constant.name)
    return tf.io.parse_tensor(value.SerializeToString(), value.dtype) if found is None else found
