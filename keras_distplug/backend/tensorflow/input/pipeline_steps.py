"""The transformations of a tf.data pipeline, read from its graph. TensorFlow 2.18 to 2.21."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import CodeType
from typing import Any

import keras
import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.python.framework import op_def_registry

# Ops that draw new seeds for every iterator if this attribute is true.
RESHUFFLING = {
    "ShuffleDatasetV3": "reshuffle_each_iteration",
    "ShuffleAndRepeatDatasetV2": "reshuffle_each_iteration",
    "RandomDatasetV2": "rerandomize_each_iteration",
}
_RANDOM_OPS = re.compile(r"Random.*|.*TruncatedNormal|Multinomial")
_NOT_RANDOM = re.compile(r"StatefulPartitionedCall|Random(Dataset|IndexShuffle).*")
_PYTHON_OPS = re.compile(r"PyFunc|PyFuncStateless|EagerPyFunc")
# Stateful in name only; the functions that the first ones call are checked separately.
_HARMLESS_OPS = re.compile(
    r"(Stateful)?PartitionedCall|If|Case|While|Assert|LookupTable(Find|Size)V2"
)
_CHANGES = re.compile(r"Assign.*Variable.*|Resource(Scatter|Apply).*|Rng.*|Stateful(?!Part).*")
FROM_GENERATOR = "from_generator"
# Folders with functions that are not the user's.
_PACKAGES = tuple(str(Path(package.__file__).parent) + os.sep for package in (tf, keras))


@dataclass(frozen=True)
class Step:
    """One transformation of a pipeline.

    Args:
        node: Its name in the graph.
        op: The name of its op, such as `ShuffleDatasetV3`.
        title: The name of the method that creates it, such as `shuffle`.
        inputs: The nodes of the datasets that it reads.
        numbers: Its arguments that are single integers or booleans.
        samples: The number of samples in the tensors that it slices; None if it slices none.
        reshuffles: True if it draws new seeds for every iterator.
        deterministic: False if the order of its elements may vary.
        parallel: True if it runs functions in parallel.
        random_ops: Random ops in its functions, with True for those that have a seed.
        python_ops: Ops in its functions that call Python.
        where: The user's function and its place in the script; None if unknown.
        calls: All ops in its functions.
        pure: True if its functions always return the same result for the same element.
        changes_variables: True if its functions change variables, like Keras' random layers and
            `tf.random.Generator`.
        unseeded_inside: Titles of unseeded shuffles in datasets that its functions create.
    """

    node: str
    op: str
    title: str
    inputs: tuple[str, ...]
    numbers: Mapping[str, int]
    samples: int | None
    reshuffles: bool
    deterministic: bool
    parallel: bool
    random_ops: tuple[tuple[str, bool], ...]
    python_ops: tuple[str, ...]
    where: str | None
    calls: frozenset[str]
    pure: bool
    changes_variables: bool
    unseeded_inside: tuple[str, ...]

    @property
    def is_seeded(self) -> bool:
        return self.numbers.get("seed", 1) != 0 or self.numbers.get("seed2", 1) != 0


def _find_place(function: Any) -> str | None:
    """Returns the place of a user's function, such as `of augment (train.py, line 14)`; None for a
    function of TensorFlow or Keras."""
    try:
        given = inspect.unwrap(getattr(function, "func", function))  # handles `functools.partial`
        code = getattr(given, "__code__", None)
    except (AttributeError, TypeError, ValueError):  # a callable with unusual attributes
        return None
    if not isinstance(code, CodeType) or code.co_filename.startswith(_PACKAGES):
        return None
    name = "" if code.co_name == "<lambda>" else f"of {code.co_name} "
    return f"{name}({Path(code.co_filename).name}, line {code.co_firstlineno})"


def _find_generator(function: Any) -> Any:
    """Returns the generator function of `Dataset.from_generator`, which maps `function`; None if
    `function` does not come from there."""
    if not str(getattr(function, "__module__", "")).endswith(".from_generator_op"):
        return None
    finalize = inspect.getclosurevars(function).nonlocals.get("finalize_fn")
    state = finalize and inspect.getclosurevars(finalize).nonlocals.get("generator_state")
    return getattr(state, "_generator", None)


def parse_steps(graph: graph_pb2.GraphDef, functions: Mapping[str, Any]) -> Iterator[Step]:
    by_name = {node.name: node for node in graph.node}
    library = {function.signature.name: function for function in graph.library.function}
    datasets = [node for node in graph.node if is_dataset(node)]
    names = {node.name for node in datasets}
    for node in datasets:
        inputs = get_inputs(node)
        constants = {
            name: by_name[given].attr["value"].tensor
            for name, given in inputs.items()
            if given in by_name and by_name[given].op == "Const"
        }
        numbers = {
            name: int(tf.make_ndarray(value))
            for name, value in constants.items()
            if value.dtype in (tf.int64.as_datatype_enum, tf.bool.as_datatype_enum)
            and not value.tensor_shape.dim
        }
        given = [functions[name]._func for name in _called_functions(node) if name in functions]
        generators = [g for f in given if (g := _find_generator(f)) is not None]
        called = list(_functions(node, library))
        inner = [each for function in called for each in function.node_def]
        randoms = [
            (each.op, any(name in each.attr and each.attr[name].i for name in ("seed", "seed2")))
            for each in inner
            if _RANDOM_OPS.fullmatch(each.op) and not _NOT_RANDOM.fullmatch(each.op)
        ]
        yield Step(
            node=node.name,
            op=node.op,
            title=FROM_GENERATOR if generators else _title(node.op),
            inputs=tuple(each for each in map(node_name, node.input) if each in names),
            numbers=numbers,
            samples=_samples(node, by_name),
            reshuffles=node.op in RESHUFFLING and node.attr[RESHUFFLING[node.op]].b,
            deterministic="deterministic" not in node.attr
            or node.attr["deterministic"].s != b"false",
            parallel="Parallel" in node.op or node.op.startswith("MapAndBatch"),
            random_ops=tuple(sorted(set(randoms))),
            python_ops=tuple(sorted({e.op for e in inner if _PYTHON_OPS.fullmatch(e.op)})),
            where=next(filter(None, map(_find_place, [*given, *generators])), None),
            calls=frozenset(each.op for each in inner),
            pure=not any(_keeps_state(each.op) for each in inner),
            changes_variables=any(_CHANGES.fullmatch(each.op) for each in inner),
            unseeded_inside=tuple(
                sorted({_title(op) for function in called for op in _unseeded(function)})
            ),
        )


def _keeps_state(op: str) -> bool:
    known = op_def_registry.get(op)
    return (known is None or known.is_stateful) and not _HARMLESS_OPS.fullmatch(op)


def get_inputs(node: Any) -> dict[str, str]:
    """Returns the nodes that an op reads, by the names of its arguments, except lists."""
    return {
        argument.name: read[0]
        for argument, read in get_arguments(node)
        if not (argument.number_attr or argument.type_list_attr)
    }


def get_arguments(node: Any) -> Iterator[tuple[Any, list[str]]]:
    """Yields the arguments of an op, with the nodes that it reads for them."""
    given = map(node_name, node.input)
    for argument in op_def_registry.get(node.op).input_arg:
        count = 1
        if argument.number_attr:
            count = node.attr[argument.number_attr].i
        elif argument.type_list_attr:
            count = len(node.attr[argument.type_list_attr].list.type)
        yield argument, list(islice(given, count))


def is_dataset(node: Any) -> bool:
    return re.search(r"Dataset(V\d)?$", node.op) is not None


def node_name(given: str) -> str:
    return given.lstrip("^").partition(":")[0]


def get_element_types(node: Any) -> tuple[Any, Any]:
    """Returns the attributes with the types and shapes of a dataset's elements."""
    types = "output_types" if "output_types" in node.attr else "Toutput_types"
    return node.attr[types], node.attr["output_shapes"]


def _samples(node: Any, by_name: Mapping[str, Any]) -> int | None:
    if node.op != "TensorSliceDataset":
        return None
    shape = by_name[node_name(node.input[0])].attr["value"].tensor.tensor_shape
    return int(shape.dim[0].size) if shape.dim else None


def _functions(node: Any, library: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the functions that an op calls, directly or indirectly."""
    waiting = list(_called_functions(node))
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in library:
            continue
        seen.add(name)
        yield library[name]
        for inner in library[name].node_def:
            waiting.extend(_called_functions(inner))


def _called_functions(node: Any) -> Iterator[str]:
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func.name
        yield from (each.name for each in value.list.func)


def _unseeded(function: Any) -> Iterator[str]:
    """Yields ops in `function` that create a dataset with the seeds 0 and 0, which in TensorFlow
    mean unseeded."""
    constants = {
        node.name: node.attr["value"].tensor for node in function.node_def if node.op == "Const"
    }
    for node in function.node_def:
        if node.op in ("ShuffleDatasetV3", "RandomDatasetV2", "RandomDataset"):
            inputs = get_inputs(node)
            seeds = [constants.get(inputs[name]) for name in ("seed", "seed2")]
            if all(seed is not None and not tf.make_ndarray(seed) for seed in seeds):
                yield node.op


def _title(op: str) -> str:
    """Returns the method name for an op, such as `map` for `ParallelMapDatasetV2`."""
    bare = re.sub(r"Dataset(V\d)?$", "", op).removeprefix("Parallel")
    return re.sub(r"(?<!^)(?=[A-Z])", "_", bare).lower()
