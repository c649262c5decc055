"""Input for `fit` that every worker sees in the same order and that can return to an epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_distplug.compat import data as compat_data
from keras_distplug.core.errors import DataError


@dataclass(frozen=True)
class Feed:
    """What `fit` is given.

    Args:
        x: The first argument of `Model.fit` that carries all of the data.
        validation_data: For `Model.fit`, split off from `x` if that was asked for.
        description: How the data is shuffled and split over the workers, for people.
    """

    x: InputAdapter
    validation_data: Any
    description: str


class InputAdapter(compat_data.DataAdapter):  # type: ignore[misc]
    """A dataset of global batches as Keras' `fit` takes it, with a place that can be returned to.

    Every iterator that Keras makes advances a seeded, reshuffling dataset. Their number is
    therefore the place at an epoch's boundary.

    Args:
        dataset: Yields global batches.
        strategy: Distributes them.
        epoch_hooks: Told of each epoch, as `keras.utils.PyDataset` is.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset,
        strategy: tf.distribute.Strategy,
        epoch_hooks: _EpochHooks | None = None,
    ) -> None:
        self._dataset = dataset
        self._counted = _CountedDataset(dataset, strategy)
        self._hooks = epoch_hooks

    def get_tf_dataset(self) -> tf.distribute.DistributedDataset:
        return self._counted

    @property
    def num_batches(self) -> int | None:
        count = int(self._dataset.cardinality().numpy())
        return count if count >= 0 else None

    @property
    def batch_size(self) -> int | None:
        return compat_data.batch_size(self._dataset)

    @property
    def has_partial_batch(self) -> bool | None:
        return None

    @property
    def partial_batch_size(self) -> int | None:
        return None

    def on_epoch_begin(self) -> None:
        if self._hooks is not None:
            self._hooks.on_epoch_begin()

    def on_epoch_end(self) -> None:
        if self._hooks is not None:
            self._hooks.on_epoch_end()

    def position(self) -> Mapping[str, Any]:
        place = {"iterators": self._counted.made}
        if self._hooks is not None:
            place["epochs"] = self._hooks.epochs
        return place

    def seek(self, position: Mapping[str, Any]) -> None:
        self._counted.advance_to(position["iterators"])
        if self._hooks is not None:
            self._hooks.epochs = position["epochs"]


class _CountedDataset(tf.distribute.DistributedDataset):  # type: ignore[misc]
    """A distributed dataset that knows how many iterators were made of it."""

    def __init__(self, dataset: tf.data.Dataset, strategy: tf.distribute.Strategy) -> None:
        self._dataset = dataset
        self._distributed = strategy.experimental_distribute_dataset(dataset)
        self.made = 0

    def __iter__(self) -> Iterator[Any]:
        self.made += 1
        return iter(self._distributed)

    @property
    def element_spec(self) -> Any:
        return self._distributed.element_spec

    def reduce(self, initial_state: Any, reduce_func: Callable[..., Any]) -> Any:
        return self._distributed.reduce(initial_state, reduce_func)

    def advance_to(self, iterators: int) -> None:
        while self.made < iterators:
            # An iterator of the dataset that is not distributed draws its seeds all the same.
            iter(self._dataset)
            self.made += 1


class _EpochHooks:
    """Shuffles the batches of a `keras.utils.PyDataset` by epoch, the same on every worker."""

    def __init__(self, inner: compat_data.DataAdapter, order: _BatchOrder) -> None:
        self._inner = inner
        self._order = order
        self.epochs = 0

    def on_epoch_begin(self) -> None:
        self._order.shuffle(self.epochs)
        self.epochs += 1
        self._inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._inner.on_epoch_end()


class _BatchOrder(keras.utils.PyDataset):  # type: ignore[misc]
    """A `PyDataset` whose batches come in an order drawn from a seed and the epoch."""

    def __init__(self, inner: keras.utils.PyDataset, shuffle: bool, seed: int) -> None:
        super().__init__(
            workers=inner.workers,
            use_multiprocessing=inner.use_multiprocessing,
            max_queue_size=inner.max_queue_size,
        )
        self._inner = inner
        self._seed = seed
        self._shuffle = shuffle
        self._order: np.ndarray | None = None

    @property
    def num_batches(self) -> int | None:
        count: int | None = self._inner.num_batches
        return count

    def __getitem__(self, index: int) -> Any:
        return self._inner[index if self._order is None else int(self._order[index])]

    def on_epoch_begin(self) -> None:
        self._inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._inner.on_epoch_end()

    def shuffle(self, epoch: int) -> None:
        if self._shuffle and self.num_batches is not None:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self.num_batches)


def feed(
    x: Any,
    y: Any,
    *,
    model: keras.Model,
    seed: int,
    batch_size: int | None = None,
    shuffle: bool = True,
    sample_weight: Any = None,
    class_weight: dict[int, float] | None = None,
    validation_data: Any = None,
    validation_split: float = 0.0,
    steps_per_epoch: int | None = None,
) -> Feed:
    """Makes the input of `fit` out of what the user gave.

    Args:
        x: A `tf.data.Dataset` of global batches, a `keras.utils.PyDataset` of global batches, a
            function without arguments that returns either, or (nested) arrays of samples.
        y: Targets, if `x` are arrays.
        model: The model that will be trained, under its strategy.
        seed: From which shuffled orders are drawn; the same on every worker.
        batch_size: Samples in a global batch, for arrays. Defaults to 32.
        shuffle: Draw a new order in each epoch: of an array's samples, of a `PyDataset`'s batches.
        sample_weight: As in `Model.fit`.
        class_weight: As in `Model.fit`.
        validation_data: As in `Model.fit`.
        validation_split: As in `Model.fit`.
        steps_per_epoch: As in `Model.fit`.

    Raises:
        DataError: For data of an unknown kind, not batched, or with batches smaller than the
            number of replicas.
    """
    strategy = model.distribute_strategy
    if callable(x) and not isinstance(x, tf.data.Dataset | keras.utils.PyDataset):
        x = x()
    if isinstance(x, tf.data.Dataset | keras.utils.PyDataset):
        for name, given in (("y", y), ("sample_weight", sample_weight)):
            if given is not None:
                raise DataError(
                    f"`{name}` goes into the dataset when `x` is a {type(x).__name__}. Received: "
                    f"{name} of type {type(given).__name__}. Let the dataset yield "
                    "(x, y) or (x, y, sample_weight)."
                )
        if validation_split:
            raise DataError(
                "`validation_split` needs `x` as arrays. Received: x of type "
                f"{type(x).__name__}. Give `validation_data`."
            )
        if batch_size is not None:
            raise DataError(
                f"`batch_size` is for arrays. Received: batch_size={batch_size} and x of type "
                f"{type(x).__name__}. Batch the dataset by the global batch instead."
            )
    hooks = None
    if isinstance(x, keras.utils.PyDataset):
        order = _BatchOrder(x, shuffle, seed)
        adapter = compat_data.adapter_for(order, class_weight=class_weight)
        dataset = adapter.get_tf_dataset()
        hooks = _EpochHooks(adapter, order)
        how = f"PyDataset, batches {'shuffled by epoch' if shuffle else 'in order'}"
        if adapter.num_batches is not None:
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(adapter.num_batches))
    elif isinstance(x, tf.data.Dataset):
        _require_batches(x, model)
        dataset = x if class_weight is None else compat_data.class_weighted(x, class_weight)
        how = "tf.data"
    else:
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = _split((x, y, sample_weight), validation_split)
        dataset = _from_arrays(
            x, y, sample_weight, class_weight, batch_size or 32, seed if shuffle else None
        )
        how = f"arrays, samples {'shuffled by epoch' if shuffle else 'in order'}"
    _require_enough(compat_data.batch_size(dataset), strategy.num_replicas_in_sync)
    dataset, sharding = _shard_by_data(dataset)
    if strategy.num_replicas_in_sync > 1:
        how = f"{how}; {sharding}"
    return Feed(InputAdapter(dataset, strategy, hooks), validation_data, how)


def _from_arrays(
    x: Any,
    y: Any,
    sample_weight: Any,
    class_weight: dict[int, float] | None,
    batch_size: int,
    seed: int | None,
) -> tf.data.Dataset:
    parts = (x,) if y is None else (x, y) if sample_weight is None else (x, y, sample_weight)
    try:
        arrays = keras.tree.map_structure(_as_array, parts)
    except (TypeError, ValueError) as error:
        raise DataError(
            "Expected `x` to be a tf.data.Dataset, a keras.utils.PyDataset, a function that "
            f"returns one, or (nested) arrays. Received: x of type {type(x).__name__}: {error}"
        ) from error
    sizes = {array.shape[0] if array.ndim else None for array in keras.tree.flatten(arrays)}
    if len(sizes) != 1 or None in sizes:
        raise DataError(
            "All of x, y and sample_weight must hold the same number of samples. Received: "
            f"{[array.shape for array in keras.tree.flatten(arrays)]}"
        )
    samples = sizes.pop()
    if not samples:
        raise DataError("`x` holds no samples. Received: arrays of length 0.")
    order = tf.data.Dataset.range(samples)
    if seed is not None:
        order = order.shuffle(samples, seed=seed, reshuffle_each_iteration=True)
    tensors = keras.tree.map_structure(tf.constant, keras.tree.lists_to_tuples(arrays))
    dataset = order.batch(batch_size).map(
        lambda rows: keras.tree.map_structure(lambda array: tf.gather(array, rows), tensors),
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )
    dataset = dataset.prefetch(tf.data.AUTOTUNE)
    return dataset if class_weight is None else compat_data.class_weighted(dataset, class_weight)


def _as_array(value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype == object:
        raise TypeError(f"{type(value).__name__} does not become an array of numbers")
    # Keras computes in floatx and casts on entry.
    return array.astype(keras.config.floatx()) if array.dtype.kind == "f" else array


def _split(arrays: Any, fraction: float) -> tuple[Any, Any]:
    """The last `fraction` of the samples become validation data, as in Keras."""
    if not 0 < fraction < 1:
        raise DataError(f"`validation_split` must be between 0 and 1. Received: {fraction}")
    arrays = keras.tree.map_structure(lambda a: None if a is None else np.asarray(a), arrays)
    samples = next(a.shape[0] for a in keras.tree.flatten(arrays) if a is not None)
    at = math.floor(samples * (1 - fraction))
    if at in (0, samples):
        raise DataError(
            f"validation_split={fraction} of {samples} samples leaves no samples on one side."
        )
    train, validation = (
        keras.tree.map_structure(lambda a, part=part: None if a is None else a[part], arrays)
        for part in (slice(None, at), slice(at, None))
    )
    return train, tuple(part for part in validation if part is not None)


def _require_batches(dataset: tf.data.Dataset, model: keras.Model) -> None:
    spec = dataset.element_spec
    shapes = [part.shape for part in keras.tree.flatten(spec) if hasattr(part, "shape")]
    inputs = keras.tree.flatten(spec[0] if isinstance(spec, tuple) else spec)
    single = False
    if model.built and len(getattr(model, "inputs", None) or ()) == 1 and len(inputs) == 1:
        wanted, given = model.inputs[0].shape, getattr(inputs[0], "shape", None)
        # Keras adds a last axis of 1 by itself.
        single = given is not None and given.rank == len(wanted) - 1 and wanted[-1] != 1
    if single or any(shape.rank == 0 for shape in shapes):
        raise DataError(
            "The dataset is not batched: it yields single samples. Received: elements of "
            f"{dataset.element_spec}. Call `.batch(global_batch_size)`: the global batch is split "
            "over the replicas."
        )


def _require_enough(batch_size: int | None, replicas: int) -> None:
    if batch_size is not None and batch_size < replicas:
        raise DataError(
            f"The global batch is smaller than the number of replicas. Received: batches of "
            f"{batch_size} samples for {replicas} replicas. Batch by at least {replicas}; the "
            "global batch is split over the replicas."
        )


def _shard_by_data(dataset: tf.data.Dataset) -> tuple[tf.data.Dataset, str]:
    """Splits each global batch over the workers, unless the user chose otherwise."""
    policy = tf.data.experimental.AutoShardPolicy
    chosen = dataset.options().experimental_distribute.auto_shard_policy
    if chosen not in (policy.AUTO, policy.DATA):
        return dataset, f"auto-shard policy {chosen.name}, as the dataset says"
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy.DATA
    return dataset.with_options(options), "auto-shard policy DATA: each global batch is split"
