"""The loop of Keras' `fit` over the batches of an epoch.

Keras 3.10 to 3.15 can start a `fit` at any epoch, but not within one, and do not expose their
`EpochIterator`. It is a local variable of `fit`, which is found in the frames that call a callback.
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


def get_loop() -> Loop | None:
    """Returns the loop of the innermost calling `fit`; None if Keras' `fit` is not a caller."""
    for frame in frames.callers(sys._getframe(1)):
        if frame.f_code.co_name == "fit":
            found = frames.local(frame, "epoch_iterator")
            if found is not None:
                return Loop(found) if isinstance(found, EpochIterator) else None
    return None


def is_of_fit(iterator: Any) -> bool:
    """True if the innermost calling `fit` reads its training data from `iterator`."""
    loop = get_loop()
    return loop is not None and loop.is_over(iterator)


def arguments_of_fit(names: Iterable[str]) -> dict[str, Any]:
    """Returns the calling `fit`'s local variables with these names: its arguments, possibly changed
    since, such as validation data split off by `validation_split`."""
    for frame in frames.callers(sys._getframe(1)):
        if frame.f_code.co_name == "fit" and frames.local(frame, "epoch_iterator") is not None:
            return {name: frames.local(frame, name) for name in names}
    return {}


def call_before_reading(model: keras.Model, act: Callable[[Loop], object]) -> None:
    """Calls `act` with the loop of every `fit` of `model`, before `fit` inspects the data."""
    stock = model._maybe_symbolic_build

    def _maybe_symbolic_build(iterator: Any = None, data_batch: Any = None) -> None:
        if iterator is not None and (loop := get_loop()) is not None:
            act(loop)
        stock(iterator=iterator, data_batch=data_batch)

    _UPSTREAM.patch(model, "_maybe_symbolic_build", _maybe_symbolic_build)


def find_validation_loop(model: keras.Model) -> Loop | None:
    """Returns the loop over a `fit`'s validation data, which is created once; None if it does not
    exist."""
    found = getattr(model, "_eval_epoch_iterator", None)
    return None if found is None else Loop(found)


def call_before_validation(model: keras.Model, act: Callable[[], None]) -> None:
    """Calls `act` once, before `fit` creates its iterator over the validation data. Keras reads
    some of the data for this, without calling a callback first."""
    stock = model._should_eval

    def _should_eval(epoch: int, validation_freq: int | list[int]) -> bool:
        decision: bool = stock(epoch, validation_freq)
        if decision:
            _UPSTREAM.patch(model, "_should_eval", stock)
            act()
        return decision

    _UPSTREAM.patch(model, "_should_eval", _should_eval)


class Loop:
    """The source from which `fit` or `evaluate` draws batches."""

    def __init__(self, epochs: EpochIterator) -> None:
        self._epochs = epochs

    def is_over(self, iterator: Any) -> bool:
        """True if it draws from this Keras iterator."""
        return self._epochs is iterator

    @property
    def dataset(self) -> tf.distribute.DistributedDataset:
        return self._epochs._distributed_dataset

    @property
    def whole_dataset(self) -> tf.data.Dataset | None:
        """The dataset of global batches; None if the user has distributed the dataset."""
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
        """True if the user's data is a tf.data.Dataset."""
        return isinstance(self.adapter, data_adapters.TFDatasetAdapter)

    @property
    def arrays(self) -> tuple[Any, int] | None:
        """The arrays from which Keras makes batches, in the structure of a batch, and the batch
        size. None if not all are arrays of numbers."""
        if not isinstance(self.adapter, data_adapters.ArrayDataAdapter):
            return None
        given = keras.tree.flatten(self.adapter._inputs)
        if not all(isinstance(each, np.ndarray) and each.dtype.kind in "fiub" for each in given):
            return None
        arrays = keras.tree.map_structure(_to_floatx, self.adapter._inputs)
        return arrays, self.adapter.batch_size

    @property
    def given_arrays(self) -> Any:
        """The arrays of any kind from which Keras makes batches; None for other data."""
        is_array = isinstance(self.adapter, data_adapters.ArrayDataAdapter)
        return self.adapter._inputs if is_array else None

    @property
    def is_generator(self) -> bool:
        """True if a single Python generator yields the batches of all epochs."""
        return isinstance(self.adapter, data_adapters.GeneratorDataAdapter)

    @property
    def torch_loader(self) -> LoaderReader | None:
        """The user's torch `DataLoader`, if the data is one."""
        is_one = isinstance(self.adapter, data_adapters.TorchDataLoaderAdapter)
        return LoaderReader(self.adapter) if is_one else None

    @property
    def py_dataset(self) -> tuple[keras.utils.PyDataset, bool, dict[int, float] | None, Any] | None:
        """The user's `PyDataset`, True if it is shuffled, the class weights, and the spec of its
        batches. None for other data."""
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
        """Frees the dataset that Keras has made from the data, before an equal one is made."""
        self._epochs._distributed_dataset = None

    def draw_from(self, adapter: data_adapters.data_adapter.DataAdapter) -> None:
        """Replaces the data of `fit`."""
        self._epochs.data_adapter = adapter
        self._epochs._distributed_dataset = adapter.get_tf_dataset()

    @property
    def is_shuffled_at_random(self) -> bool:
        """True if Keras draws the order of arrays without a seed, so that it cannot be repeated."""
        is_array = isinstance(self.adapter, data_adapters.ArrayDataAdapter)
        return is_array and self.adapter._shuffle is True and global_seed() is None

    @property
    def is_shuffled_by_seed(self) -> bool:
        """True if Keras draws the order of arrays from TensorFlow's global seed."""
        is_array = isinstance(self.adapter, data_adapters.ArrayDataAdapter)
        return is_array and bool(self.adapter._shuffle) and global_seed() is not None

    @property
    def samples_in_order(self) -> tuple[int, int] | None:
        """The batch size and the number of samples, if Keras splits samples into batches and their
        order does not depend on the batch size; otherwise None."""
        adapter = self.adapter
        is_array = isinstance(adapter, data_adapters.ArrayDataAdapter)
        if not is_array or adapter._shuffle == "batch":
            return None
        last = adapter.partial_batch_size or adapter.batch_size
        return adapter.batch_size, (adapter.num_batches - 1) * adapter.batch_size + last

    @property
    def steps_per_epoch(self) -> int | None:
        """The argument of `fit`."""
        steps: int | None = self._epochs.steps_per_epoch
        return steps

    @property
    def keeps_iterator(self) -> bool:
        """True if epochs share one iterator until it is exhausted."""
        return self._epochs.steps_per_epoch is not None

    @property
    def continues(self) -> bool:
        """True if the next epoch continues with the current epoch's iterator."""
        return self.keeps_iterator and self._epochs._current_iterator is not None

    @property
    def counted(self) -> dict[str, Any]:
        """Keras' count of batches read from the current iterator, and the data's known length."""
        seen = self._epochs._steps_seen if self.continues else 0
        return {"seen": seen, "num_batches": self._epochs._num_batches}

    def count(self, counted: Mapping[str, Any]) -> None:
        """Restores a value of `counted`."""
        self._epochs._num_batches = counted["num_batches"]
        self._epochs._steps_seen = counted["seen"]

    def prepare_next_epoch(self) -> None:
        """Creates the iterator that the next epoch continues with, unless Keras does so."""
        if self.keeps_iterator:
            self._epochs._current_iterator = iter(self.dataset)

    def batches_done(self, trained: int, left: int) -> int:
        """Returns the number of the batch with which a resumed epoch continues, so that it ends at
        the right batch.

        Args:
            trained: The number of samples trained in this epoch, in batches.
            left: The number of batches left in the current iterator; negative if unknown.
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
        """Makes the next epoch start with this batch; `math.inf` if it has no batch left."""
        stock = self._epochs._enumerate_iterator

        def remaining() -> Iterator[Any]:
            del vars(self._epochs)["_enumerate_iterator"]
            if batch != math.inf:
                # These items are only Keras' counters; it draws a batch after every one.
                yield from (item for item in stock() if item[0] >= batch)

        _UPSTREAM.patch(self._epochs, "_enumerate_iterator", remaining)


def _to_floatx(array: np.ndarray) -> np.ndarray:
    return array.astype(keras.config.floatx(), copy=False) if array.dtype.kind == "f" else array


def begin_with_logs(model: keras.Model, logs: Mapping[str, Any]) -> Callable[[], None]:
    """Gives an epoch that has no batch left the logs of its last batch. Validation is not affected.

    Returns:
        A function that undoes this.
    """
    stock = model._get_metrics_result_or_logs

    def undo() -> None:
        _UPSTREAM.patch(model, "_get_metrics_result_or_logs", stock)

    def with_logs(found: Any) -> Any:
        undo()
        metrics = model._compile_metrics
        if not found and metrics is not None and not metrics.built:
            return dict(logs)  # metrics have no result before the first step
        return stock(found or dict(logs))

    _UPSTREAM.patch(model, "_get_metrics_result_or_logs", with_logs)
    return undo
