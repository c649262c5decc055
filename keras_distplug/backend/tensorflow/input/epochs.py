"""The loop of Keras' `fit` over the batches of an epoch.

Keras 3.10 to 3.15 can begin a `fit` with any epoch, but not within one, and gives its
`EpochIterator` to nobody. It is a local variable of `fit`, and found in the frames of those who
call a callback.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers import data_adapters
from keras.src.trainers.epoch_iterator import EpochIterator

from keras_distplug.backend.tensorflow.input.readers import LoaderReader
from keras_distplug.backend.tensorflow.runtime import frames
from keras_distplug.backend.tensorflow.runtime.context import global_seed
from keras_distplug.backend.tensorflow.runtime.patching import Upstream

_UPSTREAM = Upstream(keras="3.10 to 3.15")


def of_fit() -> Loop | None:
    """The loop of the innermost `fit` that calls; None if Keras' own `fit` is not among them."""
    for frame in frames.callers(sys._getframe(1)):
        if frame.f_code.co_name == "fit":
            found = frames.local(frame, "epoch_iterator")
            if found is not None:
                return Loop(found) if isinstance(found, EpochIterator) else None
    return None


def is_of_fit(iterator: Any) -> bool:
    """Whether it is what the innermost `fit` that calls draws its training data from."""
    loop = of_fit()
    return loop is not None and loop.is_over(iterator)


def arguments_of_fit(names: Iterable[str]) -> dict[str, Any]:
    """What the `fit` that calls was given by these names, or has made of it: validation data that
    it has split off, for example."""
    for frame in frames.callers(sys._getframe(1)):
        if frame.f_code.co_name == "fit" and frames.local(frame, "epoch_iterator") is not None:
            return {name: frames.local(frame, name) for name in names}
    return {}


def before_reading(model: keras.Model, act: Callable[[Loop], object]) -> None:
    """Calls `act` with the loop of every `fit` of `model` before that looks at its data."""
    stock = model._maybe_symbolic_build

    def _maybe_symbolic_build(iterator: Any = None, data_batch: Any = None) -> None:
        if iterator is not None and (loop := of_fit()) is not None:
            act(loop)
        stock(iterator=iterator, data_batch=data_batch)

    _UPSTREAM.patch(model, "_maybe_symbolic_build", _maybe_symbolic_build)


def of_validation(model: keras.Model) -> Loop | None:
    """The loop over the validation data of a `fit`, which is made once; None if there is none."""
    found = getattr(model, "_eval_epoch_iterator", None)
    return None if found is None else Loop(found)


def before_validation(model: keras.Model, act: Callable[[], None]) -> None:
    """Calls `act` once, when `fit` is about to make its iterator over the validation data. Keras
    reads some of that data to make it, and calls no callback before."""
    stock = model._should_eval

    def _should_eval(epoch: int, validation_freq: int | list[int]) -> bool:
        decision: bool = stock(epoch, validation_freq)
        if decision:
            _UPSTREAM.patch(model, "_should_eval", stock)
            act()
        return decision

    _UPSTREAM.patch(model, "_should_eval", _should_eval)


class Loop:
    """What `fit` or `evaluate` draws batches from."""

    def __init__(self, epochs: EpochIterator) -> None:
        self._epochs = epochs

    def is_over(self, iterator: Any) -> bool:
        """Whether it draws from this iterator of Keras."""
        return self._epochs is iterator

    @property
    def dataset(self) -> tf.distribute.DistributedDataset:
        return self._epochs._distributed_dataset

    @property
    def whole_dataset(self) -> tf.data.Dataset | None:
        """Yields global batches; None if the user has distributed the dataset himself."""
        if self.is_dataset:
            given = self.adapter.get_tf_dataset()
        else:
            given = getattr(self.dataset, "_original_dataset", self.dataset)
        return given if isinstance(given, tf.data.Dataset) else None

    @property
    def adapter(self) -> data_adapters.data_adapter.DataAdapter:
        return self._epochs.data_adapter

    @property
    def is_dataset(self) -> bool:
        """Whether the data is a tf.data.Dataset of the user's."""
        return isinstance(self.adapter, data_adapters.TFDatasetAdapter)

    @property
    def arrays(self) -> tuple[Any, int] | None:
        """The arrays that Keras makes batches of, nested as these are, and the size of a batch.
        None if not all are arrays of numbers."""
        if not isinstance(self.adapter, data_adapters.ArrayDataAdapter):
            return None
        given = keras.tree.flatten(self.adapter._inputs)
        if not all(isinstance(each, np.ndarray) and each.dtype.kind in "fiub" for each in given):
            return None
        arrays = keras.tree.map_structure(_in_floatx, self.adapter._inputs)
        return arrays, self.adapter.batch_size

    @property
    def given_arrays(self) -> Any:
        """The arrays that Keras makes batches of, of any kind; None for other data."""
        is_array = isinstance(self.adapter, data_adapters.ArrayDataAdapter)
        return self.adapter._inputs if is_array else None

    @property
    def is_generator(self) -> bool:
        """Whether one Python generator gives the batches of all epochs."""
        return isinstance(self.adapter, data_adapters.GeneratorDataAdapter)

    @property
    def torch_loader(self) -> LoaderReader | None:
        """The user's torch `DataLoader`, if the data is one."""
        is_one = isinstance(self.adapter, data_adapters.TorchDataLoaderAdapter)
        return LoaderReader(self.adapter) if is_one else None

    @property
    def py_dataset(self) -> tuple[keras.utils.PyDataset, bool, dict[int, float] | None, Any] | None:
        """The user's, if the data is one; whether it is shuffled; the weights of classes; and what
        batches are like."""
        adapter = self.adapter
        if not isinstance(adapter, data_adapters.PyDatasetAdapter):
            return None
        signature = adapter._output_signature
        return adapter.py_dataset, adapter.shuffle, adapter.class_weight, signature

    @property
    def epochs_ended(self) -> int | None:
        """How many epochs of data have ended, if Keras (since 3.16) draws orders from that."""
        ended: int | None = getattr(self.adapter, "_epoch", None)
        return ended

    def release(self) -> None:
        """Frees what Keras has made of the data, before others make the same of them."""
        self._epochs._distributed_dataset = None

    def draw_from(self, adapter: data_adapters.data_adapter.DataAdapter) -> None:
        """Gives `fit` other data than it has made by itself."""
        self._epochs.data_adapter = adapter
        self._epochs._distributed_dataset = adapter.get_tf_dataset()

    @property
    def is_shuffled_at_random(self) -> bool:
        """Whether Keras draws the order of arrays in a way that nobody can repeat."""
        is_array = isinstance(self.adapter, data_adapters.ArrayDataAdapter)
        return is_array and self.adapter._shuffle is True and global_seed() is None

    @property
    def is_shuffled_by_seed(self) -> bool:
        """Whether Keras draws the order of arrays from TensorFlow's global seed."""
        is_array = isinstance(self.adapter, data_adapters.ArrayDataAdapter)
        return is_array and bool(self.adapter._shuffle) and global_seed() is not None

    @property
    def samples_in_order(self) -> tuple[int, int] | None:
        """The size of a batch and the number of samples, if Keras cuts batches out of samples whose
        order does not depend on the size."""
        adapter = self.adapter
        is_array = isinstance(adapter, data_adapters.ArrayDataAdapter)
        if not is_array or adapter._shuffle == "batch":
            return None
        last = adapter.partial_batch_size or adapter.batch_size
        return adapter.batch_size, (adapter.num_batches - 1) * adapter.batch_size + last

    @property
    def steps_per_epoch(self) -> int | None:
        """As `fit` was given it."""
        steps: int | None = self._epochs.steps_per_epoch
        return steps

    @property
    def keeps_iterator(self) -> bool:
        """Whether epochs draw from one iterator, as long as it lasts."""
        return self._epochs.steps_per_epoch is not None

    @property
    def goes_on(self) -> bool:
        """Whether the next epoch draws from the iterator that the present one leaves."""
        return self.keeps_iterator and self._epochs._current_iterator is not None

    @property
    def counted(self) -> dict[str, Any]:
        """What Keras counts of the iterator under way, and has learned of the data's length."""
        seen = self._epochs._steps_seen if self.goes_on else 0
        return {"seen": seen, "num_batches": self._epochs._num_batches}

    def count(self, counted: Mapping[str, Any]) -> None:
        """Puts back what `counted` gave."""
        self._epochs._num_batches = counted["num_batches"]
        self._epochs._steps_seen = counted["seen"]

    def go_on(self) -> None:
        """Makes the iterator that the next epoch goes on with, unless it makes one itself."""
        if self.keeps_iterator:
            self._epochs._current_iterator = iter(self.dataset)

    def batches_done(self, trained: int, left: int) -> int:
        """The number of the batch that an epoch goes on with, such that it ends where it should.

        Args:
            trained: Batches' worth of samples that it has had.
            left: Batches that the iterator under way has left; negative if that is not known.
        """
        at_once: int = self._epochs.steps_per_execution
        if self._epochs.steps_per_epoch is not None:
            total: int = self._epochs.steps_per_epoch
            left = max(0, total - trained)
        elif self.adapter.num_batches is None or left < 0:
            return at_once * math.ceil(trained / at_once)
        else:
            total = self.adapter.num_batches
        return at_once * (math.ceil(total / at_once) - math.ceil(left / at_once))

    def begin_at(self, batch: float) -> None:
        """Makes the next epoch begin with this batch. `math.inf`: it has no batch left."""
        stock = self._epochs._enumerate_iterator

        def remaining() -> Iterator[Any]:
            del vars(self._epochs)["_enumerate_iterator"]
            if batch != math.inf:
                # Keras counts, and draws a batch behind each of these only.
                yield from (item for item in stock() if item[0] >= batch)

        _UPSTREAM.patch(self._epochs, "_enumerate_iterator", remaining)


def _in_floatx(array: np.ndarray) -> np.ndarray:
    return array.astype(keras.config.floatx(), copy=False) if array.dtype.kind == "f" else array


def begin_with_logs(model: keras.Model, logs: Mapping[str, Any]) -> Callable[[], None]:
    """Gives an epoch that has no batch left the logs of its last one, but not its validation.

    Returns:
        What undoes it.
    """
    stock = model._get_metrics_result_or_logs

    def undo() -> None:
        _UPSTREAM.patch(model, "_get_metrics_result_or_logs", stock)

    def with_logs(found: Any) -> Any:
        undo()
        metrics = model._compile_metrics
        if not found and metrics is not None and not metrics.built:
            return dict(logs)  # they have no result before the first step
        return stock(found or dict(logs))

    _UPSTREAM.patch(model, "_get_metrics_result_or_logs", with_logs)
    return undo
