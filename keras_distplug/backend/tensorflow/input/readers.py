"""Keras' data adapters, the batch size of a dataset, and the transfer of datasets to a new context.

Keras 3.10 to 3.15 accept a `DataAdapter` instance as `x`, and a `tf.distribute.DistributedDataset`
returned by it, without converting them; neither behavior is documented. TensorFlow 2.18 to 2.21:
`DatasetToGraphV2` and `DatasetFromGraph` are public ops, but the dataset class that wraps their
result is private.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters.data_adapter import DataAdapter as DataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import OrderedEnqueuer, PyDatasetAdapter
from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter
from tensorflow.core.framework import graph_pb2
from tensorflow.python.data.ops import dataset_ops

from keras_distplug.backend.tensorflow.runtime import private_names

# The Python function of such an op lives in this process's registry, not in the graph.
_PYTHON_OPS = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})


class LateDistributedDataset(tf.distribute.DistributedDataset):  # type: ignore[misc]
    """A dataset that `fit` reads without converting it, and that gets its strategy from `fit`."""

    is_endless = False  # True if workers read it repeatedly, as long as steps are scheduled

    def use(self, strategy: tf.distribute.Strategy) -> None:
        raise NotImplementedError

    def note_looked(self) -> None:
        """Called if `fit` or `evaluate` would have inspected a batch before iterating."""

    def build_for_worker(self, worker: tf.Tensor, workers: int, seed: tf.Tensor) -> tf.data.Dataset:
        """Returns the dataset that a worker reads under ParameterServerStrategy. It is created on
        the worker, by a function that is traced in this process.

        Args:
            worker: The worker's number.
            workers: The number of workers.
            seed: Two numbers, for shuffling differently on every worker.
        """
        raise NotImplementedError


class SameDataset(dataset_ops.UnaryUnchangedStructureDataset):  # type: ignore[misc]
    """A dataset with the same elements as another, as a base class for datasets with extra data."""

    def __init__(self, dataset: tf.data.Dataset) -> None:
        super().__init__(dataset, dataset._variant_tensor)


def pass_strategy(iterator: Any, strategy: tf.distribute.Strategy) -> None:
    """Passes the strategy to the data of a Keras epoch iterator, if the data needs it."""
    dataset = getattr(iterator, "_distributed_dataset", None)
    if isinstance(dataset, LateDistributedDataset):
        dataset.use(strategy)


class PyReader:
    """Reads `PyDataset`s with batches like those of `first`, with as many Python workers.

    Keras' adapter restarts its workers and their order in every epoch, even in the middle of a
    pass. Here, every iterator has its own workers until it is exhausted.

    Args:
        first: A `PyDataset`.
        class_weight: The class weights, as in `Model.fit`; None for no weights.
        signature: The spec of the batches, if Keras has already read some. Defaults to `None`.
    """

    def __init__(
        self,
        first: keras.utils.PyDataset,
        class_weight: dict[int, float] | None,
        signature: Any = None,
    ) -> None:
        self._adapter = PyDatasetAdapter(first, class_weight=class_weight)
        self._adapter._output_signature = signature
        self.whole = self.dataset(lambda: first)  # reads the first batches unless already read

    def dataset(self, begin: Callable[[], keras.utils.PyDataset]) -> tf.data.Dataset:
        """Returns a dataset that reads the result of `begin`, called when an iterator starts."""
        self._adapter._get_iterator = lambda: self._read(begin)
        return self._adapter.get_tf_dataset()

    def _read(self, begin: Callable[[], keras.utils.PyDataset]) -> Iterator[Any]:
        batches = begin()
        with closing(_worked(batches)) as worked:
            for batch in islice(worked, batches.num_batches):
                yield self._adapter._standardize_batch(batch)


def _worked(batches: keras.utils.PyDataset) -> Generator[Any, None, None]:
    workers, processes = batches.workers, batches.use_multiprocessing
    if workers <= 1 and not (workers and processes):
        yield from (batches[number] for number in count())
        return
    enqueuer = OrderedEnqueuer(batches, workers, processes, batches.max_queue_size)
    private_names.start(enqueuer)  # its order is that of `batches`
    try:
        yield from enqueuer.get()
    finally:
        enqueuer.stop()


class GeneratorReader:
    """Reads generators with batches like the first ones of `first`."""

    def __init__(self, first: Iterator[Any]) -> None:
        self._adapter = GeneratorDataAdapter(first)
        self._rest = self._adapter.generator

    def rest(self) -> Iterator[Any]:
        """Returns an iterator over all batches of `first`. Call it once."""
        rest: Iterator[Any] = self._rest()
        return rest

    def dataset(self, make: Callable[[], Iterator[Any]]) -> tf.data.Dataset:
        adapter = copy.copy(self._adapter)  # calls its `generator` when it is read
        adapter.generator = make
        return adapter.get_tf_dataset()


def peeked_batch(adapter: DataAdapter) -> Any:
    """Returns the first batch of a Python generator, which Keras has read to determine shapes; None
    for other data."""
    return adapter._first_batches[0] if isinstance(adapter, GeneratorDataAdapter) else None


def skip_first_batches(
    dataset: tf.data.Dataset, adapter: DataAdapter, batches: int
) -> tf.data.Dataset:
    """Returns `dataset`, created by `adapter`, without its first `batches` batches. Those of a
    Python generator are produced, but not converted."""
    if not isinstance(adapter, GeneratorDataAdapter):
        return dataset.skip(batches)
    rest = copy.copy(adapter)
    rest.generator = lambda: islice(adapter.generator(), batches, None)
    return rest.get_tf_dataset()


def is_torch_loader(data: Any) -> bool:
    return bool(data_adapters.is_torch_dataloader(data))


class LoaderReader:
    """Reads a torch `DataLoader` as Keras does.

    Args:
        adapter: Keras' adapter of the loader.
    """

    def __init__(self, adapter: TorchDataLoaderAdapter) -> None:
        if adapter._output_signature is None:
            adapter.get_tf_dataset()  # reads the first batches
        self._adapter = adapter
        self.loader = adapter._dataloader

    @classmethod
    def of(cls, data: Any) -> LoaderReader | None:
        """Returns a reader of `data`; None if it is not a `DataLoader`."""
        return cls(TorchDataLoaderAdapter(data)) if is_torch_loader(data) else None

    @property
    def num_batches(self) -> int | None:
        count: int | None = self._adapter.num_batches
        return count

    def dataset(self, begin: Callable[[], Iterator[Any]]) -> tf.data.Dataset:
        """Returns a dataset that reads the result of `begin`, called when an iterator starts."""
        adapter = copy.copy(self._adapter)
        adapter._dataloader = _Iterable(begin)
        return adapter.get_tf_dataset()


@dataclass(frozen=True)
class _Iterable:
    begin: Callable[[], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self.begin()


def class_weighted(
    dataset: tf.data.Dataset, class_weight: dict[int, float] | None
) -> tf.data.Dataset:
    """Adds Keras' sample weights for `class_weight`, if there are any, to the batches of
    `dataset`."""
    if class_weight is None:
        return dataset
    adapter = data_adapters.get_data_adapter(dataset, class_weight=class_weight)
    return adapter.get_tf_dataset()


def batch_size(dataset: tf.data.Dataset) -> int | None:
    """Returns the number of samples in a full batch of `dataset`; None if it is unknown."""
    computed = int(tf.raw_ops.ComputeBatchSize(input_dataset=dataset._variant_tensor).numpy())
    if computed > 0:
        return computed
    inputs = [dataset]
    while len(inputs) == 1:
        [each] = inputs
        if type(each).__name__ == "_UnbatchDataset":
            return None
        if (size := getattr(each, "_batch_size", None)) is not None:
            return int(size)
        inputs = each._inputs()
    return None


@dataclass(frozen=True)
class DatasetGraph:
    """A serialized dataset. Its tensors are embedded, so it is limited to 2 GB."""

    graph: bytes
    element_spec: Any
    options: Any


def to_graph(dataset: tf.data.Dataset) -> DatasetGraph:
    graph = tf.raw_ops.DatasetToGraphV2(
        input_dataset=dataset._variant_tensor,
        external_state_policy=0,
        strip_device_assignment=True,
    )
    return DatasetGraph(graph.numpy(), dataset.element_spec, dataset.options())


def from_graph(saved: DatasetGraph) -> tf.data.Dataset:
    with tf.init_scope():
        # In a function, the constant would be folded into a dataset, which cannot be sent to a
        # worker.
        graph = tf.constant(saved.graph)
    variant = tf.raw_ops.DatasetFromGraph(graph_def=graph)
    return dataset_ops._VariantDataset(variant, saved.element_spec).with_options(saved.options)


def python_ops(saved: DatasetGraph) -> set[str]:
    """Returns the names of the ops in `saved` that call Python functions."""
    graph = graph_pb2.GraphDef.FromString(saved.graph)
    used = {node.op for node in graph.node}
    used |= {node.op for function in graph.library.function for node in function.node_def}
    return used & _PYTHON_OPS
