"""Sources that TensorFlow reads on its own: arrays, tf.data pipelines, functions of these."""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_distplug.backend.tensorflow.input import earlier_passes, pipeline, readers
from keras_distplug.backend.tensorflow.input.pipeline_steps import Step
from keras_distplug.backend.tensorflow.input.pipeline_variables import Variable
from keras_distplug.backend.tensorflow.runtime import host_memory
from keras_distplug.core.errors import DataError
from keras_distplug.data import advice, audit, contents
from keras_distplug.data.position import Source
from keras_distplug.python_state import json_values

# Parts of a fingerprint that also differ if a process makes the same pipeline a second time.
SEEDS = "seeds"
BATCH_SIZE = "batch_size"
# Rounds of the Feistel network that permutes samples. With 4, neighbors stay correlated (0.09).
_ROUNDS = 8
_MOST_BYTES_OF_VARIABLE = 2**20  # its value is stored in the manifest


class Arrays(Source):
    """Nested arrays of samples. The order in a pass depends only on the seed and the pass's number.

    Args:
        arrays: NumPy arrays of equal length, nested like the model's batches.
        batch_size: Samples in a global batch.
        seed: Seed of the shuffled orders; None keeps the samples in their own order.
        class_weight: As in `Model.fit`.
    """

    batch_size: int

    def __init__(
        self,
        arrays: Any,
        batch_size: int,
        seed: int | None,
        class_weight: dict[int, float] | None = None,
    ) -> None:
        self.batch_size = batch_size
        self._samples = len(keras.tree.flatten(arrays)[0])
        self._tensors = keras.tree.map_structure(
            host_memory.to_tensor, keras.tree.lists_to_tuples(arrays)
        )
        self._seed = seed
        self._class_weight = class_weight
        self._pass = pipeline.from_numbers(self._make_pass, 2)
        self._pass_behind = pipeline.from_numbers(self._make_pass, 3)
        self.whole = self._pass(0, 0)

    @property
    def num_batches(self) -> int:
        return math.ceil(self._samples / self.batch_size)

    def batches(
        self, passed: int, start: int, behind: int = 0, read: int | None = None
    ) -> tf.data.Dataset:
        return self._pass_behind(passed, start, behind) if behind else self._pass(passed, start)

    def _make_pass(
        self, passed: tf.Tensor, start: tf.Tensor, behind: tf.Tensor | None = None
    ) -> tf.data.Dataset:
        def gathered(rows: tf.Tensor) -> Any:
            if self._seed is not None:
                halves = [self._seed % 2**32, self._seed // 2**32 % 2**32]
                rows = self._permuted(rows, [tf.constant(halves, tf.int64), [passed]])
            return self._gathered(rows)

        first = start * self.batch_size + (0 if behind is None else behind)
        rows = tf.data.Dataset.range(first, self._samples)
        return self._in_batches(rows, gathered, from_start=behind is None)

    def as_dataset(self) -> tf.data.Dataset:
        """Returns the batches as a dataset for transformations; if shuffled, it draws its own order
        in every pass."""
        rows = tf.data.Dataset.range(self._samples)
        if self._seed is not None:
            rows = rows.shuffle(self._samples, seed=self._seed, reshuffle_each_iteration=True)
        return self._in_batches(rows, self._gathered)

    def _in_batches(
        self, rows: tf.data.Dataset, gathered: Callable[[tf.Tensor], Any], from_start: bool = True
    ) -> tf.data.Dataset:
        """Returns the batches of the samples that `gathered` returns for row numbers."""
        # Batches of a known size, as in plain Keras, make steps faster.
        are_full = from_start and self._samples % self.batch_size == 0
        dataset = rows.batch(self.batch_size, drop_remainder=are_full).map(
            gathered, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
        )
        dataset = readers.class_weighted(dataset, self._class_weight)
        options = tf.data.Options()
        # The default optimizations would copy the arrays.
        options.experimental_optimization.apply_default_optimizations = False
        return dataset.prefetch(tf.data.AUTOTUNE).with_options(options)

    def build_for_worker(self, worker: tf.Tensor, workers: int, seed: tf.Tensor) -> tf.data.Dataset:
        """Returns endless passes over all samples, every pass in a different order; without
        shuffling, the worker's share of the batches."""

        def pass_of(own: tf.Tensor) -> tf.data.Dataset:
            rows = tf.data.Dataset.range(self._samples).batch(self.batch_size)
            return rows.map(
                lambda rows: self._permuted(rows, [own, [tf.constant(self._seed, tf.int64)]])
            )

        if self._seed is None:
            rows = tf.data.Dataset.range(self._samples).batch(self.batch_size)
            rows = rows.shard(workers, worker)
        else:
            passes = tf.data.Dataset.counter().map(
                lambda number: tf.random.experimental.stateless_fold_in(seed, number)
            )
            rows = passes.flat_map(pass_of)
        dataset = rows.map(self._gathered, num_parallel_calls=tf.data.AUTOTUNE)
        dataset = readers.class_weighted(dataset, self._class_weight)
        return dataset.prefetch(tf.data.AUTOTUNE)

    def _permuted(self, rows: tf.Tensor, seeds: Sequence[Any]) -> tf.Tensor:
        return tf.raw_ops.RandomIndexShuffle(
            index=rows,
            seed=tf.concat(seeds, 0),
            max_index=tf.constant(self._samples - 1, tf.int64),
            rounds=_ROUNDS,
        )

    def _gathered(self, rows: tf.Tensor) -> Any:
        return keras.tree.map_structure(lambda array: tf.gather(array, rows), self._tensors)

    def _described(self) -> Mapping[str, Any]:
        return {
            "kind": "arrays",
            BATCH_SIZE: self.batch_size,
            "elements": elements(self.whole),
            "samples": self._samples,
            "shuffle": self._seed is not None,
            **described_weights(self._class_weight),
        }

    @functools.cached_property
    def contents(self) -> Mapping[str, str]:
        return contents.fingerprint_arrays(self._tensors)


@dataclass(frozen=True)
class _Stored:
    """A variable of a pipeline as JSON."""

    variable: Variable

    def read(self) -> Any:
        return json_values.encode(self.variable.read())

    def assign(self, value: Any, *, in_pass: bool) -> None:
        self.variable.assign(json_values.decode(value))


@dataclass(frozen=True)
class _Counts:
    """The number of orders that the shuffles of a dataset have drawn."""

    dataset: tf.data.Dataset
    is_validation: bool

    def read(self) -> list[list[int]]:
        return [list(counts) for counts in earlier_passes.count_iterators(self.dataset)]

    def assign(self, value: Any, *, in_pass: bool) -> None:
        counts = [(made, read) for made, read in value]
        # Training data with the same shuffles is restored first, and was read since.
        earlier_passes.restore(self.dataset, counts, or_more=self.is_validation)


class TfData(Source):
    """A pipeline of tf.data that yields global batches.

    A pass has the orders that plain tf.data would draw for it, with one exception: a shuffle before
    a `repeat` in a pipeline that every epoch reads from its start. See `reordered`.

    Args:
        dataset: The user's dataset.
        seed: Seed for operations that have none.
        is_validation: True if `fit` validates with it.
    """

    def __init__(
        self, dataset: tf.data.Dataset, seed: int = 0, *, is_validation: bool = False
    ) -> None:
        self._is_validation = is_validation
        self.whole = dataset
        self.batch_size = readers.batch_size(dataset)
        self._why_unreadable: str | None = None
        self._pipeline: pipeline.Pipeline | None = None
        try:
            self._pipeline = pipeline.read(dataset)
        except pipeline.UnreadableError as error:
            self._why_unreadable = str(error)
        self._seed = seed
        self._orders = None if self._pipeline is None else _Orders(self._pipeline, seed, {})
        self._used_seeds = "" if self._pipeline is None else audit.seeds(self._pipeline)
        changed = [] if self._pipeline is None else self._pipeline.variables
        small = [each for each in changed if each.nbytes <= _MOST_BYTES_OF_VARIABLE]
        self.variables = [*map(_Stored, small), _Counts(dataset, is_validation)]
        self._too_large = [each for each in changed if each.nbytes > _MOST_BYTES_OF_VARIABLE]

    @property
    def lacks_prefetch(self) -> bool:
        return self._pipeline is not None and advice.lacks_prefetch(self._pipeline)

    def advice(self, *, workers: int, epochs: int) -> list[str]:
        """Returns the result of `advice.advise`."""
        if self._pipeline is None:
            return []
        return advice.advise(self._pipeline, self.whole, workers=workers, epochs=epochs)

    @property
    def num_batches(self) -> int | None:
        count = int(self.whole.cardinality().numpy())
        return count if count >= 0 else None

    @property
    def seeded_by_run(self) -> list[str]:
        """Transformations without a seed, which get one from the run."""
        return [] if self._orders is None else self._orders.unseeded

    @property
    def reordered(self) -> list[str]:
        """Transformations whose orders are not plain Keras' from the second pass on."""
        is_endless = int(self.whole.cardinality().numpy()) == tf.data.INFINITE_CARDINALITY
        # Training then reads it in one pass, which has plain Keras' order if it is the first one.
        is_one_pass = is_endless and not self._is_validation
        if self._orders is None or (is_one_pass and not any(map(any, self._counts().values()))):
            return []
        return self._orders.own

    @property
    def why_not_by_samples(self) -> str | None:
        if self._pipeline is None:
            return f"the pipeline cannot be inspected: {self._why_unreadable}"
        title = self._pipeline.bound_to_batches
        return title and f"samples cannot be skipped in the result of `{title}`"

    @property
    def why_not_on_workers(self) -> str | None:
        called = readers.python_ops(readers.to_graph(self.whole))
        return f"the pipeline runs Python code ({', '.join(sorted(called))})" if called else None

    def build_for_worker(self, worker: tf.Tensor, workers: int, seed: tf.Tensor) -> tf.data.Dataset:
        """Returns the pipeline with other orders; or the worker's share of the batches if there are
        no orders to draw or they are unknown."""
        if self._orders is None or not self._orders.nodes:
            with tf.init_scope():  # outside the function that is traced
                graph = readers.to_graph(self.whole)
            return readers.from_graph(graph).shard(workers, worker)
        return self._orders.build_for_worker(seed)

    def batches(
        self, passed: int, start: int, behind: int = 0, read: int | None = None
    ) -> tf.data.Dataset:
        read = passed if read is None else read
        if start and not behind and start == self.num_batches:
            return self.whole.take(0)  # without computing the skipped batches
        if self._orders is not None:
            if not (start or behind or self._orders.nodes):
                return self.whole
            return self._orders.pass_dataset(passed, read, start, behind, self._counts())
        self._skip_passes(passed)
        return self.whole.skip(start) if start else self.whole

    def _counts(self) -> Mapping[str, tuple[int, int]]:
        assert self._pipeline is not None
        nodes, counts = self._pipeline.shuffles(), earlier_passes.count_iterators(self.whole)
        return dict(zip(nodes, counts, strict=True)) if len(nodes) == len(counts) else {}

    def _skip_passes(self, passed: int) -> None:
        """Makes as many iterators of a pipeline that cannot be inspected as there were passes."""
        drawn = _iterators_of.get(self.whole, 0)
        if drawn > passed:
            warnings.warn(
                "The dataset was already iterated over in this process. If it is shuffled, its "
                "order cannot be reset, because the pipeline cannot be inspected: "
                f"{self._why_unreadable}. This `fit` may see the samples in a different order than "
                "in a new process. Create the dataset again before `fit`.",
                stacklevel=2,
            )
        with earlier_passes.paused():
            for _ in range(drawn, passed):
                iter(self.whole)
        _iterators_of[self.whole] = max(drawn, passed) + 1

    def _described(self) -> Mapping[str, Any]:
        facts = {"kind": "tf.data", BATCH_SIZE: self.batch_size, "elements": elements(self.whole)}
        if self._pipeline is not None:
            facts |= {**audit.chain(self._pipeline), SEEDS: self._used_seeds}
        return facts

    @functools.cached_property
    def contents(self) -> Mapping[str, str]:
        return {} if self._pipeline is None else contents.fingerprint_pipeline(self._pipeline)

    def use_seeds(self, seeds: str) -> bool:
        if self._pipeline is None:
            return False
        steps = audit.seeded(self._pipeline)
        pairs = [tuple(map(int, each.split(", "))) for each in seeds.split("; ") if each]
        if len(pairs) != len(steps):
            return False
        given = {
            step.node: (first, second) for step, (first, second) in zip(steps, pairs, strict=True)
        }
        self._orders = _Orders(self._pipeline, self._seed, given)
        self._used_seeds = seeds
        return True

    def note_made(self, passed: int) -> None:
        earlier_passes.add(self.whole, 1, 0, least=(passed, 0))

    def note_read(self, read: int) -> None:
        earlier_passes.add(self.whole, 0, 1, least=(0, read))

    def note_looked(self, passed: int, read: int) -> None:
        if self._is_validation:  # other data need not match plain Keras' order
            self.note_made(passed)
            self.note_read(read)

    def warnings(self) -> list[str]:
        if self._pipeline is None:
            return [
                f"the pipeline cannot be inspected: {self._why_unreadable}. Its order is "
                "reproduced if every `shuffle` has a seed, and no `shuffle` comes before a "
                "`repeat`, a `concatenate` or another `shuffle`"
            ]
        too_large = [
            f"it changes a variable of {each.nbytes / 2**20:.0f} MB, which is not saved. Keep "
            f"changing values in variables of at most {_MOST_BYTES_OF_VARIABLE // 2**20} MB"
            for each in self._too_large
        ]
        lines = audit.audit(self._pipeline, is_resumed_mid_pass=not self._is_validation)
        return lines + too_large


# Number of iterators made of datasets that cannot be inspected.
_iterators_of: weakref.WeakKeyDictionary[tf.data.Dataset, int] = weakref.WeakKeyDictionary()


class DatasetFunction(TfData):
    """The dataset that a function of an `InputContext` returns.

    If one process reads the data and splits global batches, the function is called once, for the
    only input pipeline. If every worker reads the data itself, it is called once per worker, in the
    chief's process, and the datasets that it makes are created on the workers.

    Args:
        make: The user's function.
        seed: As in `TfData`.
        class_weight: As in `Model.fit`.
    """

    def __init__(
        self,
        make: Callable[[tf.distribute.InputContext], tf.data.Dataset],
        seed: int,
        class_weight: dict[int, float] | None,
    ) -> None:
        self._make = make
        self._class_weight = class_weight
        super().__init__(self._make_dataset(0, 1), seed)

    def build_for_worker(self, worker: tf.Tensor, workers: int, seed: tf.Tensor) -> tf.data.Dataset:
        def get_variant(number: int) -> Callable[[], tf.Tensor]:
            return lambda: tf.data.experimental.to_variant(self._make_dataset(number, workers))

        variant = tf.switch_case(
            tf.cast(worker, tf.int32), [get_variant(number) for number in range(workers)]
        )
        return tf.data.experimental.from_variant(variant, self.whole.element_spec)

    def _make_dataset(self, number: int, pipelines: int) -> tf.data.Dataset:
        made = self._make(tf.distribute.InputContext(pipelines, number))
        if not isinstance(made, tf.data.Dataset):
            raise DataError(
                "Expected the function given as `x`, which takes a tf.distribute.InputContext, to "
                f"return a tf.data.Dataset. Received: {type(made).__name__}."
            )
        return readers.class_weighted(made, self._class_weight)


@dataclass(frozen=True)
class _Drawn:
    """The seeds of a pass for a transformation.

    Args:
        node: Its node.
        seeds: The seeds that it has, or draws from.
        varies: True if it draws others for every iterator.
        once: True if it draws exactly once per iterator.
        by_reading: True if it draws when the first element is read, not when the iterator is made.
    """

    node: str
    seeds: tuple[int, int]
    varies: bool
    once: bool
    by_reading: bool


class _Orders:
    """The seeds of a pipeline in all of its passes.

    Args:
        parts: The pipeline.
        seed: Seed for transformations that have none.
        given: Seeds to use instead of the pipeline's own.
    """

    def __init__(
        self, parts: pipeline.Pipeline, seed: int, given: Mapping[str, tuple[int, int]]
    ) -> None:
        read, cached = parts.drawn_once(by_reading=True), parts.cached()
        once = parts.drawn_once() | read
        self._pipeline = parts
        self._drawn: list[_Drawn] = []
        self.unseeded: list[str] = []
        self.own: list[str] = []  # those that draw several times restart in every pass
        for step in parts.steps:
            node, is_seeded = step.node, step.is_seeded
            if is_seeded and not step.reshuffles and node not in given:
                continue
            seeds = given.get(node) or _list_seeds(step, seed, len(self._drawn))
            # A cache keeps the order of the first pass.
            varies = step.reshuffles and node not in cached
            drawn = _Drawn(node, seeds, varies, varies and node in once, varies and node in read)
            self._drawn.append(drawn)
            if not is_seeded:
                self.unseeded.append(step.title)
            elif varies and not drawn.once:
                self.own.append(step.title)
        self.nodes = [each.node for each in self._drawn]

    @functools.cached_property
    def _remake(self) -> Callable[[Sequence[tuple[int, int]], int, int], tf.data.Dataset]:
        fixed = frozenset(each.node for each in self._drawn if each.once)
        return self._pipeline.make_rebuilder(self.nodes, fixed)

    def pass_dataset(
        self, passed: int, read: int, start: int, behind: int, counts: Mapping[str, tuple[int, int]]
    ) -> tf.data.Dataset:
        seeds = []
        for each in self._drawn:
            # Other code may have read it, too.
            made_by_all, read_by_all = counts.get(each.node, (0, 0))
            number = max(read, read_by_all) if each.by_reading else max(passed, made_by_all)
            is_drawn = each.once or (each.varies and number)
            seeds.append(pipeline.draw(*each.seeds, number) if is_drawn else each.seeds)
        return self._remake(seeds, start, behind)

    def build_for_worker(self, seed: tf.Tensor) -> tf.data.Dataset:
        """Returns the pipeline with orders that depend on the given, user's and run's seeds."""
        ours = tf.constant([each.seeds for each in self._drawn], tf.int64)
        drawn = tf.random.stateless_uniform(ours.shape, seed, 0, 2**62, tf.int64)
        return self._pipeline.reseeded(self.nodes, tf.bitwise.bitwise_xor(ours, drawn))


def _list_seeds(step: Step, seed: int, number: int) -> tuple[int, int]:
    if step.is_seeded:
        return step.numbers["seed"], step.numbers["seed2"]
    first, second = np.random.SeedSequence([seed, number]).generate_state(2)
    return int(first), int(second)


def described_weights(class_weight: Mapping[int, float] | None) -> Mapping[str, str]:
    """Returns a fingerprint's part for class weights; empty without class weights."""
    if class_weight is None:
        return {}
    return {"class_weight": str({int(c): float(w) for c, w in sorted(class_weight.items())})}


def elements(dataset: tf.data.Dataset) -> str:
    """Returns shapes and types of a sample's parts, with their names, without the batch size."""

    def text(spec: Any) -> str:
        shape = getattr(spec, "shape", tf.TensorShape(None))
        dims = "?" if shape.rank is None else ", ".join(str(size) for size in shape[1:])
        dtype = getattr(spec, "dtype", None)
        return f"{dtype.name if dtype is not None else type(spec).__name__}[{dims}]"

    return str(keras.tree.map_structure(text, dataset.element_spec)).replace("'", "")
