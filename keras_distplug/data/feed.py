"""Input for `fit` that every worker sees in the same order and that can start at any batch."""

from __future__ import annotations

import inspect
import math
import reprlib
import types
import warnings
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_distplug.backend.tensorflow import trainer
from keras_distplug.backend.tensorflow.input import readers
from keras_distplug.backend.tensorflow.input.earlier_passes import walk_upstream
from keras_distplug.backend.tensorflow.runtime.workers import make_chief_strategy
from keras_distplug.core.errors import DataError
from keras_distplug.data.advice import PREFETCHED
from keras_distplug.data.position import Positioned, Source, sharded
from keras_distplug.data.python_sources import Generator, PyData
from keras_distplug.data.sources import Arrays, DatasetFunction, TfData
from keras_distplug.data.torch_sources import LoaderData


@dataclass(frozen=True)
class Feed:
    """The input of `fit`.

    Args:
        x: The first argument of `Model.fit` that carries all of the data.
        validation_data: The `validation_data` of `Model.fit`, split off from `x` if requested.
        description: How the data is shuffled and split over the workers, for the user.
        advice: Suggested improvements; every item is a line.
    """

    x: InputAdapter
    validation_data: Any
    description: str
    advice: tuple[str, ...] = ()


class InputAdapter(readers.DataAdapter):  # type: ignore[misc]
    """A source of global batches in the form that Keras' `fit` accepts.

    Args:
        source: The data.
        fetches_ahead: As in `Positioned`.
    """

    has_partial_batch = None
    partial_batch_size = None

    def __init__(self, source: Source, *, fetches_ahead: bool = False) -> None:
        self._positioned = Positioned(source, fetches_ahead=fetches_ahead)

    def get_tf_dataset(self) -> Positioned:
        return self._positioned

    @property
    def num_batches(self) -> int | None:
        return None if self._positioned.is_endless else self._positioned.source.num_batches

    @property
    def batch_size(self) -> int | None:
        return self._positioned.source.batch_size

    def on_epoch_begin(self) -> None:
        self._positioned.source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._positioned.source.on_epoch_end()


class InputDataset(InputAdapter, readers.SameDataset):
    """An `InputAdapter` that a model's own `fit` may transform as a `tf.data.Dataset`, before it
    calls Keras' `fit`.

    Args:
        source: The data.
        dataset: The same batches.
        seed: As in `resumable`; also applies to datasets made from `dataset`.
    """

    def __init__(self, source: Source, dataset: tf.data.Dataset, seed: int) -> None:
        InputAdapter.__init__(self, source)
        readers.SameDataset.__init__(self, dataset)
        self.seed = seed


class OpaqueInput(InputAdapter):
    """An `InputAdapter` that raises an error if it is used in any other way than as an argument of
    Keras' `fit`.

    Args:
        source: The data.
        kind: The kind of data that the user gave.
    """

    def __init__(self, source: Source, kind: str) -> None:
        super().__init__(source)
        self._why_not = (
            f"Expected `resumable(...)` of a {kind} to reach Keras' `fit` unchanged. Received: "
            "other code uses it as data, probably the model's own `fit`. Give the data to that "
            "`fit` without `resumable`: with the callbacks of `defaults()` it is resumed just as "
            "well."
        )

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise DataError(self._why_not)

    __array__ = __getitem__ = __iter__ = __len__ = __tf_tensor__ = _refuse

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"There is no attribute `{name}`. {vars(self).get('_why_not')}")


def get_seed(dataset: tf.data.Dataset, default: int) -> int:
    """Returns the seed of the `resumable` data from which `dataset` was made, or `default`."""
    found = (each.seed for each in walk_upstream(dataset) if isinstance(each, InputDataset))
    return next(found, default)


def resumable(
    x: Any,
    y: Any = None,
    *,
    batch_size: int | None = None,
    shuffle: bool = True,
    sample_weight: Any = None,
    class_weight: dict[int, float] | None = None,
    seed: int = 0,
) -> InputAdapter:
    """Returns data for `Model.fit` that can be started at any batch of any epoch.

    With the callbacks of `defaults()`, a run that was killed resumes after the last batch of its
    checkpoint, with the batches that would have followed. `distributed_fit` does not need this.

    Example:

    ```python
    model.fit(kd.resumable(ds), epochs=10, callbacks=kd.defaults("runs/mnist", save_freq=100))
    model.fit(kd.resumable(x, y, batch_size=64), epochs=10, callbacks=kd.defaults("runs/digits"))
    ```

    It replaces `x`, `y`, `batch_size`, `shuffle`, `sample_weight` and `class_weight` of `fit`,
    which ignores its own. A warning lists the steps of a `tf.data` pipeline that cannot be
    reproduced.

    A model whose class has its own `fit` may transform it as a `tf.data.Dataset` of batches, if it
    was made from arrays or a `tf.data.Dataset`. Pass other data to such a `fit` directly.

    Args:
        x: A `tf.data.Dataset`, a `keras.utils.PyDataset` or a torch `DataLoader` of *global*
            batches, a generator of them, a function without arguments that returns one of these,
            or (nested) arrays of samples.
        y: Targets, if `x` is arrays.
        batch_size: Samples in a *global* batch, for arrays. Defaults to 32.
        shuffle: Draw a new order in every epoch: of an array's samples, of a `PyDataset`'s batches.
            Defaults to `True`.
        sample_weight: As in `Model.fit`.
        class_weight: As in `Model.fit`.
        seed: Seed of the orders: those of `shuffle`, and of a pipeline's transformations without a
            seed. Must be the same in every process of a run. Defaults to 0.

    Returns:
        The first argument of `Model.fit`.

    Raises:
        DataError: If the data is of an unknown kind, or not batched; in `fit`, if the model's own
            `fit` cannot use it.
    """
    trainer.install_dispatch()  # tells the strategy before the first batch is read
    source, _ = _source(made(x), y, sample_weight, class_weight, batch_size, shuffle, seed)
    report_warnings(source)
    if isinstance(source, Arrays):
        return InputDataset(source, source.as_dataset(), seed)
    if isinstance(source, TfData) and not _takes_context(x):
        return InputDataset(source, source.whole, seed)
    kind = "function" if inspect.isfunction(x) else type(x).__name__
    return OpaqueInput(source, kind)


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
    workers: int = 1,
    epochs: int = 1,
) -> Feed:
    """Makes the input of `fit` from the user's data.

    Args:
        x: As in `resumable`.
        y: As in `resumable`.
        model: The model that will be trained, under its strategy.
        seed: Seed of the shuffled orders; the same on every worker.
        batch_size: Samples in a global batch, for arrays. Defaults to 32.
        shuffle: Draw a new order in every epoch: of an array's samples, of a `PyDataset`'s batches.
        sample_weight: As in `Model.fit`.
        class_weight: As in `Model.fit`.
        validation_data: As in `Model.fit`.
        validation_split: As in `Model.fit`.
        workers: Number of processes that train.
        epochs: As in `Model.fit`.

    Raises:
        DataError: If the data is of an unknown kind, not batched, or has batches smaller than the
            number of replicas.
    """
    strategy = model.distribute_strategy
    x = made(x)
    if validation_split and validation_data is None:
        if _is_batched(x) or callable(x):
            raise DataError(
                "`validation_split` requires `x` to be arrays. Received: x of type "
                f"{type(x).__name__}. Pass `validation_data` instead."
            )
        (x, y, sample_weight), validation_data = _split((x, y, sample_weight), validation_split)
    source, how = _source(x, y, sample_weight, class_weight, batch_size, shuffle, seed, model)
    advice: list[str] = []
    lacks_prefetch = False
    if isinstance(source, TfData):
        advice = source.advice(workers=workers, epochs=epochs)
        # Strategies other than the default one prefetch automatically.
        lacks_prefetch = source.lacks_prefetch and strategy is make_chief_strategy()
    adapter = InputAdapter(source, fetches_ahead=lacks_prefetch)
    adapter.get_tf_dataset().use(strategy)
    report_warnings(source)
    if lacks_prefetch:
        advice.append(PREFETCHED)
    if adapter.get_tf_dataset().is_scheduled:
        how = f"{how}; every worker reads the data itself"
    elif strategy.num_replicas_in_sync > 1:
        how = f"{how}; {_sharding(source)}"
    return Feed(adapter, validation_data, how, tuple(advice))


def _source(
    x: Any,
    y: Any,
    sample_weight: Any,
    class_weight: dict[int, float] | None,
    batch_size: int | None,
    shuffle: bool,
    seed: int,
    model: keras.Model | None = None,
) -> tuple[Source, str]:
    """Returns the source, and a description of how it is shuffled, for the user."""
    if _takes_context(x):
        _refuse_extra_arguments(x, y, sample_weight, batch_size)
        of_workers = DatasetFunction(x, seed, class_weight)
        _require_batches(of_workers.whole, model)
        return of_workers, "tf.data, from a function"
    if not _is_batched(x) and not callable(x):
        arrays = _arrays(x, y, sample_weight)
        order = "shuffled by epoch" if shuffle else "in order"
        source = Arrays(arrays, batch_size or 32, seed if shuffle else None, class_weight)
        return source, f"arrays, samples {order}"
    _refuse_extra_arguments(x, y, sample_weight, batch_size)
    if isinstance(x, keras.utils.PyDataset):
        order = "shuffled by epoch" if shuffle and x.num_batches is not None else "in order"
        return PyData(x, shuffle, seed, class_weight), f"PyDataset, batches {order}"
    if (loader := readers.LoaderReader.of(x)) is not None:
        if class_weight is not None:
            raise DataError(
                "`class_weight` is not supported for a torch DataLoader. Received: class_weight="
                f"{class_weight}. Let its dataset yield (x, y, sample_weight)."
            )
        return LoaderData(loader), "torch DataLoader"
    if not isinstance(x, tf.data.Dataset):
        return Generator(x, class_weight), "Python generator"
    _require_batches(x, model)
    pipeline = TfData(readers.class_weighted(x, class_weight), seed)
    if not pipeline.seeded_by_run:
        return pipeline, "tf.data"
    titles = " and ".join(sorted(set(pipeline.seeded_by_run)))
    return pipeline, f"tf.data, {titles} without a seed seeded by the run"


def _refuse_extra_arguments(x: Any, y: Any, sample_weight: Any, batch_size: int | None) -> None:
    for name, given in (("y", y), ("sample_weight", sample_weight)):
        if given is not None:
            raise DataError(
                f"`{name}` must be part of the dataset if `x` is a {type(x).__name__}. Received: "
                f"{name} of type {type(given).__name__}. Let the dataset yield "
                "(x, y) or (x, y, sample_weight)."
            )
    if batch_size is not None:
        raise DataError(
            f"`batch_size` applies to arrays only. Received: batch_size={batch_size} and x of type "
            f"{type(x).__name__}. Omit it, and let the data yield batches of the global batch size."
        )


def _is_batched(x: Any) -> bool:
    kinds = tf.data.Dataset | keras.utils.PyDataset | types.GeneratorType
    return isinstance(x, kinds) or readers.is_torch_loader(x)


def _takes_context(x: Any) -> bool:
    """Returns True if `x` is a function with one required argument."""
    if not callable(x) or isinstance(x, tf.data.Dataset):
        return False
    try:
        parameters = inspect.signature(x).parameters.values()
    except (TypeError, ValueError):  # of a class implemented in C, such as generators
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in kinds and each.default is each.empty for each in parameters) == 1


def made(x: Any) -> Any:
    """Returns the result of `x` if it is a function; `x` itself if it returns a generator, since
    every pass needs a new one, or takes an `InputContext`."""
    if not callable(x) or _is_batched(x) or _takes_context(x):
        return x
    made = x()
    return x if isinstance(made, types.GeneratorType) else made


def report_warnings(source: Source, *, is_validation: bool = False) -> None:
    """Warns of data that a resumed run may not reproduce, or only at a cost."""
    if lines := source.warnings():
        what = "validation data" if is_validation else "training data"
        listed = "\n".join(f"- {line}." for line in lines)
        warnings.warn(
            f"A resumed run may not reproduce its {what} exactly:\n{listed}", stacklevel=3
        )


def _arrays(x: Any, y: Any, sample_weight: Any) -> Any:
    parts = (x,) if y is None else (x, y) if sample_weight is None else (x, y, sample_weight)
    try:
        arrays = keras.tree.map_structure(_as_array, tuple(map(_without_lists, parts)))
    except (TypeError, ValueError) as error:
        raise DataError(
            "Expected `x` to be a tf.data.Dataset, a keras.utils.PyDataset, a torch DataLoader, a "
            "generator, a function that returns one, or (nested) arrays, and `y` and "
            "`sample_weight` to be (nested) arrays. Received: x of type "
            f"{type(x).__name__}; x, y or sample_weight could not be converted to arrays: {error}"
        ) from error
    sizes = {array.shape[0] if array.ndim else None for array in keras.tree.flatten(arrays)}
    if len(sizes) != 1 or None in sizes:
        shapes = [array.shape for array in keras.tree.flatten(arrays)]
        raise DataError(
            "Expected x, y and sample_weight to be (nested) arrays with the same number of "
            f"samples. Received: arrays of shapes {reprlib.repr(shapes)}. Convert a list of lists "
            "with np.array."
        )
    if not sizes.pop():
        raise DataError("`x` holds no samples. Received: arrays of length 0.")
    return arrays


def _without_lists(value: Any) -> Any:
    """Makes arrays from lists of texts or numbers; other lists are nested structures."""
    if isinstance(value, list) and all(
        isinstance(each, str | bytes | int | float) for each in value
    ):
        return np.asarray(value)
    return value


def _as_array(value: Any) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype == object and not all(isinstance(each, str | bytes) for each in array.flat):
        raise TypeError(
            f"a value of type {type(value).__name__} is not an array of numbers or strings: as an "
            "array, its dtype is object"
        )
    # Keras computes in floatx and casts on entry.
    return array.astype(keras.config.floatx(), copy=False) if array.dtype.kind == "f" else array


def _split(arrays: Any, fraction: float) -> tuple[Any, Any]:
    """Splits off the last `fraction` of the samples as validation data, like Keras."""
    if not 0 < fraction < 1:
        raise DataError(f"`validation_split` must be above 0 and below 1. Received: {fraction}")
    arrays = keras.tree.map_structure(lambda a: None if a is None else np.asarray(a), arrays)
    samples = next(a.shape[0] for a in keras.tree.flatten(arrays) if a is not None)
    at = math.floor(samples * (1 - fraction))
    if at in (0, samples):
        raise DataError(
            "Expected `validation_split` to leave samples for training and for validation. "
            f"Received: validation_split={fraction} of {samples} samples."
        )
    train, validation = (
        keras.tree.map_structure(lambda a, part=part: None if a is None else a[part], arrays)
        for part in (slice(None, at), slice(at, None))
    )
    return train, tuple(part for part in validation if part is not None)


def _require_batches(dataset: tf.data.Dataset, model: keras.Model | None) -> None:
    spec = dataset.element_spec
    shapes = [part.shape for part in keras.tree.flatten(spec) if hasattr(part, "shape")]
    inputs = keras.tree.flatten(spec[0] if isinstance(spec, tuple) else spec)
    single = False
    expected = list(getattr(model, "inputs", None) or ())
    if model is not None and model.built and len(expected) == len(inputs) == 1:
        expected_shape, given = expected[0].shape, getattr(inputs[0], "shape", None)
        # Keras adds a last axis of size 1 automatically.
        single = (
            given is not None and given.rank == len(expected_shape) - 1 and expected_shape[-1] != 1
        )
    if single or any(shape.rank == 0 for shape in shapes):
        raise DataError(
            "The dataset is not batched: it yields single samples. Received: elements of "
            f"{dataset.element_spec}. Call `.batch(global_batch_size)`: the global batch is split "
            "over the replicas."
        )


def _sharding(source: Source) -> str:
    chosen = sharded(source.whole).options().experimental_distribute.auto_shard_policy
    if chosen == tf.data.experimental.AutoShardPolicy.DATA:
        return "auto-shard policy DATA: every global batch is split"
    return f"auto-shard policy {chosen.name}, set by the dataset"
