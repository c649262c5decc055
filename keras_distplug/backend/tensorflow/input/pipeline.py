"""A tf.data pipeline, taken apart and put together again with other seeds.

TensorFlow 2.18 to 2.21. Every reshuffling op draws two seeds from a generator of its own whenever
it makes an iterator (`RandomSeedGenerator`: Philox with the key `seed` and the counter `seed2`).
An op below another shuffle, a `repeat` or a `concatenate` does so at a time that depends on how far
the passes before were read, by whom, and how fast; so a pass cannot be had again by its number.
Names of dataset ops, and `DatasetToGraphV2`, are public; datasets made of a variant, the table of
ops, and a dataset's inputs are not.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import CodeType
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import xxhash
from tensorflow.core.framework import graph_pb2
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.framework import config, op_def_registry

_MOST_BYTES = 512 * 2**20  # of tensors in the pipeline: taking it apart copies them
_LARGE_BYTES = 1024  # of one tensor

# They draw seeds for each iterator if the attribute says so.
_RESHUFFLING = {
    "ShuffleDatasetV3": "reshuffle_each_iteration",
    "ShuffleAndRepeatDatasetV2": "reshuffle_each_iteration",
    "RandomDatasetV2": "rerandomize_each_iteration",
}
# What makes the iterator of its input together with its own, once.
_EAGER = re.compile(
    r"(Parallel)?(Batch|PaddedBatch|Map|MapAndBatch|Filter|Prefetch|Options|Take|Skip|Zip|Shard"
    r"|Unbatch|Rebatch|Window|Scan|TakeWhile|Interleave|FlatMap|AssertCardinality|Model"
    r"|DirectedInterleave|SlidingWindow)Dataset(V\d)?"
)
_SHUFFLES = re.compile(r"ShuffleDataset(V\d)?")  # makes it when its first element is read
_RANDOM_OPS = re.compile(r"Random.*|.*TruncatedNormal|Multinomial")
_NOT_RANDOM = re.compile(r"StatefulPartitionedCall|Random(Dataset|IndexShuffle).*")
_PYTHON_OPS = re.compile(r"PyFunc|PyFuncStateless|EagerPyFunc")
# Stateful by name only; what the first ones call is looked at by itself.
_HARMLESS_OPS = re.compile(
    r"(Stateful)?PartitionedCall|If|Case|While|Assert|LookupTable(Find|Size)V2"
)
_MAPS = re.compile(r"(Parallel)?MapDataset(V\d)?")
_BATCHES = re.compile(r"BatchDatasetV2|ParallelBatchDataset")
_BESIDE = re.compile(r"(Prefetch|Options)Dataset")
_ORDERING = re.compile(r"ShuffleDatasetV3|RepeatDataset")
_RESOURCES = re.compile(r"VarHandleOp|.*HashTable.*")
_CHANGES = re.compile(r"Assign.*Variable.*|Resource(Scatter|Apply).*|Rng.*|Stateful(?!Part).*")
FROM_GENERATOR = "from_generator"
_COUNT = "distplug_batches_to_leave_out"
# Where functions are that no user has written.
_PACKAGES = tuple(str(Path(package.__file__).parent) + os.sep for package in (tf, keras))


class UnreadableError(Exception):
    """The pipeline cannot be taken apart; says why."""


@dataclass(frozen=True)
class Step:
    """One transformation of a pipeline.

    Args:
        node: Its name in the graph.
        op: The name of its op, such as `ShuffleDatasetV3`.
        title: What a user writes for it, such as `shuffle`.
        inputs: Nodes of the datasets that it reads.
        numbers: Its arguments that are single integers or booleans.
        samples: Of the tensors that it holds, if it slices them.
        reshuffles: It draws new seeds for each iterator.
        deterministic: False if it may give its elements in another order each time.
        parallel: It runs functions at the same time.
        random_ops: In its functions, with whether they have a seed.
        python_ops: In its functions.
        where: The function that it was given and its place in the script, if known.
        calls: Ops in its functions.
        pure: Its functions give the same for the same element, whatever they were called for.
        changes_variables: Its functions do, as random layers of Keras and a `tf.random.Generator`.
        unseeded_inside: Titles of unseeded shuffles of datasets that its functions make.
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


@dataclass(frozen=True)
class Variable:
    """A variable that functions of a pipeline refer to, whoever has made it."""

    handle: tf.Tensor

    @property
    def dtype(self) -> tf.DType:
        return tf.as_dtype(self._told.dtype)

    @property
    def nbytes(self) -> int:
        elements: int = tf.TensorShape(self._told.shape).num_elements() or 0
        return elements * int(self.dtype.size)

    @property
    def _told(self) -> Any:
        return self.handle._handle_data.shape_and_type[0]

    def read(self) -> np.ndarray:
        with tf.device(self.handle.device):
            value = tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)
        return np.asarray(value)

    def assign(self, value: Any) -> None:
        with tf.device(self.handle.device):
            given = tf.constant(np.asarray(value), self.dtype)
            tf.raw_ops.AssignVariableOp(resource=self.handle, value=given)


@dataclass(frozen=True)
class _Cut:
    """The place in a pipeline where elements are left out, as near to the files as gives the same
    others.

    Maps, and batches, of elements that are left out are not computed: which elements come does not
    depend on what pure maps make of them, so that these go above shuffles and repeats.

    Args:
        at: What is read there.
        above: From the output on, what stays above it.
        ordering: What of the elements' order is decided above it, and goes below.
    """

    at: Step
    above: tuple[Step, ...]
    ordering: tuple[Step, ...]

    @property
    def batches(self) -> list[Step]:
        return [step for step in self.above if _BATCHES.fullmatch(step.op)]

    def elements_of(self, batches: int, samples: int) -> int:
        """How many elements make so many batches, and samples of them."""
        sizes = [step.numbers["batch_size"] for step in self.batches]
        return batches * math.prod(sizes) + samples * math.prod(sizes[1:])


@dataclass(frozen=True)
class Pipeline:
    """The transformations of a dataset, those that are read first."""

    steps: tuple[Step, ...]
    _dataset: tf.data.Dataset
    _graph: graph_pb2.GraphDef
    _output: str
    _held: Mapping[str, tf.Tensor]  # values of large constants, which the graph has no more
    _resources: Mapping[str, Mapping[str, tf.Tensor]]  # by the step that refers to them

    @property
    def variables(self) -> list[Variable]:
        """Those that reading it changes, in the order in which its steps refer to them."""
        steps = [step for step in self.steps if step.changes_variables]
        handles = itertools.chain.from_iterable(
            self._resources.get(step.node, {}).values() for step in steps
        )
        by_id = {id(each): each for each in handles}
        return [Variable(each) for each in by_id.values() if _is_variable(each)]

    @property
    def options(self) -> tf.data.Options:
        return self._dataset.options()

    def step(self, node: str) -> Step:
        return self._by_node[node]

    @functools.cached_property
    def _by_node(self) -> dict[str, Step]:
        return {each.node: each for each in self.steps}

    @property
    def chain(self) -> Iterator[Step]:
        """From the output on, as long as one reads one other."""
        step = self.step(self._output)
        yield step
        while len(step.inputs) == 1:
            step = self.step(step.inputs[0])
            yield step

    @property
    def global_batch(self) -> Step | None:
        """What makes batches of samples; None if it is not one of the ops for that."""
        step = self.step(self._output)
        while not _BATCHES.fullmatch(step.op):
            if len(step.inputs) != 1 or step.op == "UnbatchDataset":
                return None
            step = self.step(step.inputs[0])
        return step

    @property
    def bound_to_batches(self) -> str | None:
        """Title of what keeps samples from being left out; None if nothing does."""
        cut = self._cut()
        return None if cut.batches else (*cut.ordering, cut.at)[0].title

    def drawn_once(self, *, by_reading: bool = False) -> frozenset[str]:
        """Nodes that draw their seeds exactly once an iterator, when it is made.

        Args:
            by_reading: Those that draw when the first element is read, instead.
        """
        paths: Counter[str] = Counter()
        lazy = set()
        waiting = [(self._output, True, False)]
        while waiting:
            node, is_once, is_lazy = waiting.pop()
            paths[node] += 1 if is_once else 2
            if is_lazy:
                lazy.add(node)
            if paths[node] > 2:
                continue
            step = self.step(node)
            makes_later = _SHUFFLES.fullmatch(step.op) is not None
            joins = step.op == "ConcatenateDataset"  # makes its second input after its first one
            is_once &= makes_later or joins or _EAGER.fullmatch(step.op) is not None
            waiting += [
                (each, is_once, is_lazy or makes_later or (joins and number > 0))
                for number, each in enumerate(step.inputs)
            ]
        return frozenset(
            node for node, count in paths.items() if count == 1 and (node in lazy) == by_reading
        )

    def shuffles(self) -> list[str]:
        """Nodes of shuffles, from the end of the pipeline on, each as often as it is read."""
        found, waiting = [], [self._output]
        while waiting:
            step = self.step(waiting.pop())
            if _SHUFFLES.fullmatch(step.op):
                found.append(step.node)
            waiting += reversed(step.inputs)
        return found

    def cached(self) -> frozenset[str]:
        """Nodes that a cache reads, for good, at the first pass."""
        caches = [step for step in self.steps if step.op.startswith("CacheDataset")]
        found: set[str] = set()
        waiting = [each for step in caches for each in step.inputs]
        while waiting:
            if (node := waiting.pop()) not in found:
                found.add(node)
                waiting += self.step(node).inputs
        return frozenset(found)

    def remaker(
        self, nodes: Sequence[str], fixed: frozenset[str]
    ) -> Callable[[Sequence[tuple[int, int]], int, int], tf.data.Dataset]:
        """A function of seeds, and of numbers of batches and of samples to leave out at the begin,
        that gives the dataset so, with no memory of passes.

        Args:
            nodes: Have a `seed` and a `seed2`; the function takes theirs in this order.
            fixed: Those of `nodes` whose seeds are the ones to shuffle with, not those to draw
                from.
        """
        made = {}
        cut, shared = self._cut(), _merged(self._resources)

        def remade(seeds: Sequence[tuple[int, int]], batches: int, samples: int) -> tf.data.Dataset:
            elements = cut.elements_of(batches, samples)
            leaves_out = elements > 0
            if leaves_out not in made:
                made[leaves_out] = self._maker(nodes, fixed, cut if leaves_out else None, shared)
            values = np.asarray(seeds, "int64").reshape(len(nodes), 2)
            return made[leaves_out](tf.constant(values), tf.constant(elements, tf.int64))

        return remade

    def reseeded(self, nodes: Sequence[str], seeds: tf.Tensor) -> tf.data.Dataset:
        """The dataset with other seeds, within a function that may run elsewhere.

        Args:
            nodes: Have a `seed` and a `seed2`.
            seeds: A row of two for each of them.
        """
        # Elsewhere variables and tables are not in reach, so that it has copies of them.
        made = self._maker(nodes, frozenset(), None, shared={})
        return made(seeds, tf.constant(0, tf.int64))

    def _maker(
        self,
        nodes: Sequence[str],
        fixed: frozenset[str],
        cut: _Cut | None,
        shared: Mapping[str, tf.Tensor],
    ) -> Callable[[tf.Tensor, tf.Tensor], tf.data.Dataset]:
        graph = graph_pb2.GraphDef()
        graph.CopyFrom(self._graph)
        _keep_what_is_read(graph, self._output, shared)
        output = self._output if cut is None else _leave_out(graph, cut)
        by_name = {node.name: node for node in graph.node}
        seeds_of: dict[str, tuple[str, str]] = {}
        fresh: list[str] = []
        for name in nodes:
            node = by_name[name]
            inputs = _inputs_of(node)
            seeds_of[name] = (inputs["seed"], inputs["seed2"])
            if "seed_generator" in inputs:
                fresh.append(inputs["seed_generator"])
            if name in fixed:
                node.attr[_RESHUFFLING[node.op]].b = False
        held = {name: value for name, value in self._held.items() if name in by_name}
        given = {each for pair in seeds_of.values() for each in pair} | set(fresh) | set(held)
        for node in list(graph.node):
            if node.name in given:
                graph.node.remove(node)

        def build(seeds: tf.Tensor, elements: tf.Tensor) -> Any:
            inputs = {} if cut is None else {_COUNT: elements}
            inputs |= {name: tf.identity(value) for name, value in held.items()}
            inputs |= {name: tf.identity(value) for name, value in shared.items()}
            for row, name in enumerate(nodes):
                inputs |= {each: seeds[row, at] for at, each in enumerate(seeds_of[name])}
            inputs |= {name: tf.raw_ops.DummySeedGenerator() for name in fresh}
            [variant] = tf.graph_util.import_graph_def(
                graph, input_map=inputs, return_elements=[f"{output}:0"], name=""
            )
            return variant

        with tf.device("CPU:0"):
            specs = [tf.TensorSpec([len(nodes), 2], tf.int64), tf.TensorSpec([], tf.int64)]
            function = tf.compat.v1.wrap_function(build, specs)
        dataset = self._dataset  # keeps alive what the graph only refers to

        def remade(seeds: tf.Tensor, elements: tf.Tensor) -> tf.data.Dataset:
            variant = function(seeds, elements)
            made = dataset_ops._VariantDataset(variant, dataset.element_spec)
            return made.with_options(dataset.options())

        return remade

    def _cut(self) -> _Cut:
        above: list[Step] = []
        ordering: list[Step] = []
        step = self.step(self._output)
        while len(step.inputs) == 1:
            if _ORDERING.fullmatch(step.op):
                ordering.append(step)
            elif (
                (_BATCHES.fullmatch(step.op) and not ordering)
                or _BESIDE.fullmatch(step.op)
                or (_MAPS.fullmatch(step.op) and step.pure and step.deterministic)
            ):
                above.append(step)
            else:
                break
            step = self.step(step.inputs[0])
        return _Cut(step, tuple(above), tuple(ordering))


def _take_large(graph: graph_pb2.GraphDef, dataset: tf.data.Dataset) -> dict[str, tf.Tensor]:
    """Takes the values of large constants out of `graph`. They are the tensors that `dataset` was
    made of, as far as possible, so that they are held once."""
    given = itertools.chain.from_iterable(map(_tensors_of, _chain(dataset)))
    candidates = [each for each in given if _bytes_of(each) > _LARGE_BYTES]
    found: dict[str, tf.Tensor] = {}
    for node in graph.node:
        if node.op != "Const":
            continue
        value = node.attr["value"].tensor
        content = value.tensor_content  # a copy
        is_variant = value.dtype == tf.variant.as_datatype_enum  # of ragged and sparse tensors
        if is_variant or len(content) + sum(map(len, value.string_val)) <= _LARGE_BYTES:
            continue
        own = (each for each in candidates if content and _is_value_of(value, content, each))
        found[node.name] = next(own, None)
        if found[node.name] is None:
            # `tf.make_ndarray` cannot read strings that were serialized here.
            found[node.name] = tf.io.parse_tensor(value.SerializeToString(), value.dtype)
        for field, _ in value.ListFields():
            if field.name not in ("dtype", "tensor_shape"):
                value.ClearField(field.name)
    return found


def _is_value_of(value: Any, content: bytes, tensor: tf.Tensor) -> bool:
    shape = [dim.size for dim in value.tensor_shape.dim]
    if value.dtype != tensor.dtype.as_datatype_enum or shape != list(tensor.shape):
        return False
    hashed = xxhash.xxh3_128_digest
    return bool(hashed(content) == hashed(tensor))


def _leave_out(graph: graph_pb2.GraphDef, cut: _Cut) -> str:
    """Makes a place for a number of elements to leave out at the cut. Returns the new output."""
    by_name = {node.name: node for node in graph.node}
    types, shapes = _elements_of(by_name[cut.at.node])
    leaving_out = graph.node.add(name="distplug_leave_out", op="SkipDataset")
    leaving_out.input.extend(["", _COUNT])
    for node in [leaving_out, *(by_name[each.node] for each in cut.ordering)]:
        node.attr["output_types"].CopyFrom(types)
        node.attr["output_shapes"].CopyFrom(shapes)
    chain = [by_name[each.node] for each in cut.above]
    chain += [leaving_out, *(by_name[each.node] for each in cut.ordering), by_name[cut.at.node]]
    for reader, read_ in pairwise(chain):
        reader.input[0] = read_.name
    return str(chain[0].name)


def read(dataset: tf.data.Dataset) -> Pipeline:
    """Takes `dataset` apart.

    Raises:
        UnreadableError: If that is not possible.
    """
    held = sum(map(_bytes_of, itertools.chain.from_iterable(map(_tensors_of, _chain(dataset)))))
    if held > _MOST_BYTES:
        raise UnreadableError(f"it holds {held / 2**20:.0f} MB of tensors")
    try:
        serialized = tf.raw_ops.DatasetToGraphV2(
            input_dataset=dataset._variant_tensor,
            external_state_policy=1,
            strip_device_assignment=False,  # without a device, `tf.py_function` does not run again
        )
    except tf.errors.OpError as error:
        raise UnreadableError(str(error.message).partition("\n")[0]) from error
    text = serialized.numpy()
    del serialized
    whole = graph_pb2.GraphDef.FromString(text)
    del text
    large = _take_large(whole, dataset)
    graph = graph_pb2.GraphDef()
    graph.CopyFrom(whole)  # without the memory of what was taken
    del whole
    [returned] = [node for node in graph.node if node.op == "_Retval"]
    output = _name_of(returned.input[0])
    graph.node.remove(returned)
    functions = _functions_of(dataset)
    resources = _resources(graph, functions)
    read_ = graph_pb2.GraphDef()
    read_.CopyFrom(graph)
    _keep_what_is_read(read_, output, _merged(resources))
    if copied := sorted({node.op for node in read_.node if _RESOURCES.fullmatch(node.op)}):
        raise UnreadableError(f"what its functions refer to cannot be found ({', '.join(copied)})")
    steps = tuple(_steps(graph, functions))
    return Pipeline(steps, dataset, graph, output, large, resources)


def _functions_of(dataset: tf.data.Dataset) -> dict[str, Any]:
    """What transformations of `dataset` were given to call, by the names in its graph."""
    return {
        each.function.name.decode(): each for part in _chain(dataset) for each in part._functions()
    }


def _place_of(function: Any) -> str | None:
    """Where a user's function is, such as `of augment (train.py, line 14)`; None for one of
    TensorFlow or Keras."""
    try:
        given = inspect.unwrap(getattr(function, "func", function))  # also of a `functools.partial`
        code = getattr(given, "__code__", None)
    except (AttributeError, TypeError, ValueError):  # of a callable with attributes of any kind
        return None
    if not isinstance(code, CodeType) or code.co_filename.startswith(_PACKAGES):
        return None
    name = "" if code.co_name == "<lambda>" else f"of {code.co_name} "
    return f"{name}({Path(code.co_filename).name}, line {code.co_firstlineno})"


def _given_to_from_generator(function: Any) -> Any:
    """The generator function of `Dataset.from_generator`, which maps `function`; None if it is not
    that."""
    if not str(getattr(function, "__module__", "")).endswith(".from_generator_op"):
        return None
    finalize = inspect.getclosurevars(function).nonlocals.get("finalize_fn")
    state = finalize and inspect.getclosurevars(finalize).nonlocals.get("generator_state")
    return getattr(state, "_generator", None)


def _resources(
    graph: graph_pb2.GraphDef, functions: Mapping[str, Any]
) -> dict[str, dict[str, tf.Tensor]]:
    """Variables, tables and the like that `functions` refer to: for each op of the graph, by the
    nodes that make copies of them. TensorFlow writes down their values, not whose they are."""
    captured = {name: each.function.captured_inputs for name, each in functions.items()}
    found: dict[str, dict[str, tf.Tensor]] = {}
    for node in graph.node:
        called = {name: value.func.name for name, value in node.attr.items() if value.func.name}
        for attribute, function in called.items() if _is_dataset(node) else ():
            if function in captured:
                given = _arguments_of(node, attribute if len(called) > 1 else "")
                pairs = zip(given, captured[function], strict=True)
                own = {name: tensor for name, tensor in pairs if tensor.dtype == tf.resource}
                found.setdefault(node.name, {}).update(own)
    return found


def _merged(resources: Mapping[str, Mapping[str, tf.Tensor]]) -> dict[str, tf.Tensor]:
    return {name: tensor for own in resources.values() for name, tensor in own.items()}


def _is_variable(handle: tf.Tensor) -> bool:
    told = getattr(handle, "_handle_data", None)
    return told is not None and len(told.shape_and_type) == 1


def _arguments_of(node: Any, function: str) -> list[str]:
    """Nodes that an op gives on to its function with this attribute; "" for its only one."""
    given = iter(node.input)
    found: list[str] = []
    for argument in op_def_registry.get(node.op).input_arg:
        names = [_name_of(next(given)) for _ in range(_count_of(node, argument))]
        if re.fullmatch(rf"{function or '.*'}_?other_arg(ument)?s", argument.name):
            found += names
    return found


def _keep_what_is_read(graph: graph_pb2.GraphDef, output: str, given: Collection[str]) -> None:
    """Removes from `graph` whatever only `given` needs, and them."""
    by_name = {node.name: node for node in graph.node}
    read, waiting = set(), [output]
    while waiting:
        name = waiting.pop()
        if name not in read and name not in given:
            read.add(name)
            waiting += map(_name_of, by_name[name].input)
    for node in list(graph.node):
        if node.name not in read:
            graph.node.remove(node)


def draw(seed: int, seed2: int, number: int) -> tuple[int, int]:
    """The seeds that a reshuffling op with these draws for its iterator of that number."""
    block = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[4],
        key=tf.constant([seed % 2**64], tf.uint64),
        counter=tf.constant([number // 2, seed2 % 2**64], tf.uint64),
        alg=1,
        dtype=tf.uint32,
    ).numpy()
    first = 2 * (number % 2)
    return int(block[first]), int(block[first + 1])


def is_op_determinism_on() -> bool:
    return bool(config.is_op_determinism_enabled())


def from_numbers(
    make: Callable[..., tf.data.Dataset], numbers: int
) -> Callable[..., tf.data.Dataset]:
    """`make`, a function of so many integers, traced once: a call of it takes a millisecond."""
    specs: list[Any] = []

    @tf.function(input_signature=[tf.TensorSpec([], tf.int64)] * numbers, autograph=False)  # type: ignore[untyped-decorator]
    def variant(*given: tf.Tensor) -> tf.Tensor:
        made = make(*given)
        specs[:] = [made.element_spec]
        return made._variant_tensor

    @functools.cache
    def traced() -> Any:
        return variant.get_concrete_function()

    def dataset(*given: int) -> tf.data.Dataset:
        with tf.device("CPU:0"):
            found = traced()(*(tf.constant(each, tf.int64) for each in given))
        return dataset_ops._VariantDataset(found, specs[0])

    return dataset


def _chain(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """A dataset and the ones that it reads. By no recursion: chains can be long."""
    waiting = [dataset]
    while waiting:
        each = waiting.pop()
        yield each
        waiting += reversed(each._inputs())


def _tensors_of(dataset: tf.data.Dataset) -> list[tf.Tensor]:
    held = tf.nest.flatten(getattr(dataset, "_tensors", ()))
    return [each for each in held if isinstance(each, tf.Tensor) and hasattr(each, "numpy")]


def _bytes_of(tensor: tf.Tensor) -> int:
    """Without what its elements refer to: strings, and parts of ragged and sparse tensors."""
    elements: int = tensor.shape.num_elements() or 0
    return elements * int(tensor.dtype.size)


def _steps(graph: graph_pb2.GraphDef, functions: Mapping[str, Any]) -> Iterator[Step]:
    by_name = {node.name: node for node in graph.node}
    library = {function.signature.name: function for function in graph.library.function}
    datasets = [node for node in graph.node if _is_dataset(node)]
    names = {node.name for node in datasets}
    for node in datasets:
        inputs = _inputs_of(node)
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
        given = [functions[name]._func for name in _called_by(node) if name in functions]
        generators = [g for f in given if (g := _given_to_from_generator(f)) is not None]
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
            inputs=tuple(each for each in map(_name_of, node.input) if each in names),
            numbers=numbers,
            samples=_samples(node, by_name),
            reshuffles=node.op in _RESHUFFLING and node.attr[_RESHUFFLING[node.op]].b,
            deterministic="deterministic" not in node.attr
            or node.attr["deterministic"].s != b"false",
            parallel="Parallel" in node.op or node.op.startswith("MapAndBatch"),
            random_ops=tuple(sorted(set(randoms))),
            python_ops=tuple(sorted({e.op for e in inner if _PYTHON_OPS.fullmatch(e.op)})),
            where=next(filter(None, map(_place_of, [*given, *generators])), None),
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


def _inputs_of(node: Any) -> dict[str, str]:
    """Nodes that an op reads, by the names of its arguments; lists are left out."""
    names: dict[str, str] = {}
    given = iter(node.input)
    for argument in op_def_registry.get(node.op).input_arg:
        read = [_name_of(next(given)) for _ in range(_count_of(node, argument))]
        if not (argument.number_attr or argument.type_list_attr):
            [names[argument.name]] = read
    return names


def _count_of(node: Any, argument: Any) -> int:
    """How many inputs of an op are one argument."""
    if argument.number_attr:
        return int(node.attr[argument.number_attr].i)
    if argument.type_list_attr:
        return len(node.attr[argument.type_list_attr].list.type)
    return 1


def _is_dataset(node: Any) -> bool:
    return re.search(r"Dataset(V\d)?$", node.op) is not None


def _name_of(given: str) -> str:
    return given.lstrip("^").partition(":")[0]


def _elements_of(node: Any) -> tuple[Any, Any]:
    """The attributes that tell types and shapes of a dataset's elements."""
    types = "output_types" if "output_types" in node.attr else "Toutput_types"
    return node.attr[types], node.attr["output_shapes"]


def _samples(node: Any, by_name: Mapping[str, Any]) -> int | None:
    if node.op != "TensorSliceDataset":
        return None
    shape = by_name[_name_of(node.input[0])].attr["value"].tensor.tensor_shape
    return int(shape.dim[0].size) if shape.dim else None


def _functions(node: Any, library: Mapping[str, Any]) -> Iterator[Any]:
    """Functions that an op calls, and those that these call."""
    waiting = list(_called_by(node))
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in library:
            continue
        seen.add(name)
        yield library[name]
        for inner in library[name].node_def:
            waiting.extend(_called_by(inner))


def _called_by(node: Any) -> Iterator[str]:
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func.name
        yield from (each.name for each in value.list.func)


def _unseeded(function: Any) -> Iterator[str]:
    """Ops in `function` that make a dataset with the seeds 0 and 0, as TensorFlow spells `None`."""
    constants = {
        node.name: node.attr["value"].tensor for node in function.node_def if node.op == "Const"
    }
    for node in function.node_def:
        if node.op in ("ShuffleDatasetV3", "RandomDatasetV2", "RandomDataset"):
            inputs = _inputs_of(node)
            seeds = [constants.get(inputs[name]) for name in ("seed", "seed2")]
            if all(seed is not None and not tf.make_ndarray(seed) for seed in seeds):
                yield node.op


def _title(op: str) -> str:
    """`ParallelMapDatasetV2` -> `map`."""
    bare = re.sub(r"Dataset(V\d)?$", "", op).removeprefix("Parallel")
    return re.sub(r"(?<!^)(?=[A-Z])", "_", bare).lower()
