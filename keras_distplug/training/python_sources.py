"""Sources whose batches Python code makes: `keras.utils.PyDataset` and generators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_distplug.compat import data as compat_data
from keras_distplug.training.sources import elements

_HELD = 32  # first batches of a generator, for passes that only look at them


class PyData:
    """A `keras.utils.PyDataset` of global batches, in an order drawn from a seed and the pass.

    Args:
        dataset: The user's.
        shuffle: Draw a new order of its batches in each pass.
        seed: Of the orders.
        class_weight: As in `Model.fit`.
    """

    batch_size = None

    def __init__(
        self,
        dataset: keras.utils.PyDataset,
        shuffle: bool,
        seed: int,
        class_weight: dict[int, float] | None = None,
    ) -> None:
        self._given = dataset
        self._shuffle = shuffle
        self._seed = seed
        self._reader = compat_data.PyReader(_Rest(dataset, 0), class_weight)
        self.whole = self._counted(self._reader.whole, 0)

    @property
    def num_batches(self) -> int | None:
        count: int | None = self._given.num_batches
        return count

    @property
    def why_not_by_samples(self) -> str:
        return f"{type(self._given).__name__} makes the batches"

    @property
    def variables(self) -> tuple[()]:
        return ()

    @property
    def why_not_on_workers(self) -> str:
        return f"the Python code of {type(self._given).__name__} is in this process"

    def of_worker(self, worker: tf.Tensor, workers: int, seed: tf.Tensor) -> tf.data.Dataset:
        raise NotImplementedError(self.why_not_on_workers)

    def batches(self, passed: int, start: int, behind: int = 0) -> tf.data.Dataset:
        count = self.num_batches
        order = None
        if count is not None and self._shuffle:
            order = np.random.default_rng([self._seed, passed]).permutation(count)
        if order is None and not start:
            return self.whole
        return self._counted(self._reader.dataset(_Rest(self._given, start, order)), start)

    def _counted(self, dataset: tf.data.Dataset, start: int) -> tf.data.Dataset:
        if (count := self.num_batches) is None:
            return dataset
        return dataset.apply(tf.data.experimental.assert_cardinality(count - start))

    def on_epoch_begin(self) -> None:
        self._given.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._given.on_epoch_end()

    def fingerprint(self) -> Mapping[str, Any]:
        return {
            "kind": "PyDataset",
            "class": type(self._given).__name__,
            "batches": self.num_batches,
            "elements": elements(self.whole),
            "shuffle": self._shuffle,
        }

    def warnings(self) -> list[str]:
        ours = keras.utils.PyDataset
        hooks = [
            name
            for name in ("on_epoch_begin", "on_epoch_end")
            if getattr(type(self._given), name) is not getattr(ours, name)
        ]
        return [
            f"{type(self._given).__name__}.{name}: what it changes in the dataset is not stored. "
            "Let batches depend on their index only; `shuffle=True` draws an order for each epoch"
            for name in hooks
        ]


class _Rest(keras.utils.PyDataset):  # type: ignore[misc]
    """The batches of a `PyDataset` in another order, from one of them on."""

    def __init__(
        self, given: keras.utils.PyDataset, start: int, order: np.ndarray | None = None
    ) -> None:
        super().__init__(
            workers=given.workers,
            use_multiprocessing=given.use_multiprocessing,
            max_queue_size=given.max_queue_size,
        )
        self._given = given
        self._start = start
        self._order = order

    @property
    def num_batches(self) -> int | None:
        count = self._given.num_batches
        return None if count is None else count - self._start

    def __getitem__(self, index: int) -> Any:
        place = self._start + index
        return self._given[place if self._order is None else int(self._order[place])]


class Generator:
    """Batches of a Python generator, read over from the first one when training goes on.

    Args:
        make: Returns a generator of global batches; each pass has one of its own. Or a generator,
            which cannot be begun anew: all of training is one pass.
        class_weight: As in `Model.fit`.
    """

    batch_size = None
    num_batches = None

    def __init__(
        self,
        make: Callable[[], Iterator[Any]] | Iterator[Any],
        class_weight: dict[int, float] | None = None,
    ) -> None:
        self._class_weight = class_weight
        self._make = make if callable(make) else None
        self._reader = compat_data.GeneratorReader(make() if callable(make) else make)
        self._one = _OnePass(self._reader.rest())
        self.whole = self.batches(0, 0)

    @property
    def why_not_by_samples(self) -> str:
        return "a Python generator makes the batches"

    @property
    def variables(self) -> tuple[()]:
        return ()

    @property
    def why_not_on_workers(self) -> str:
        return "the Python generator is in this process"

    def of_worker(self, worker: tf.Tensor, workers: int, seed: tf.Tensor) -> tf.data.Dataset:
        raise NotImplementedError(self.why_not_on_workers)

    def batches(self, passed: int, start: int, behind: int = 0) -> tf.data.Dataset:
        dataset = self._reader.dataset(lambda: self._read(start))
        if self._class_weight is None:
            return dataset
        return compat_data.class_weighted(dataset, self._class_weight)

    def _read(self, start: int) -> Iterator[Any]:
        batches = self._one.batches() if self._make is None else self._make()
        for number, batch in enumerate(batches):
            if number >= start:
                yield batch

    def fingerprint(self) -> Mapping[str, Any]:
        return {"kind": "generator", "elements": elements(self.whole)}

    def warnings(self) -> list[str]:
        again = "" if self._make else ", and it has to be a new generator that begins anew"
        return [
            "a Python generator is read over when training goes on: behind n batches of a pass it "
            f"takes as long as it takes to make n batches{again}. What it gives must be the same "
            "each time. A keras.utils.PyDataset begins at any batch at once"
        ]


class _OnePass:
    """The batches of a generator, from the first one again while hardly any were read.

    Keras looks at a batch, for its shapes, before it trains.
    """

    def __init__(self, rest: Iterator[Any]) -> None:
        self._rest = rest
        self._held: list[Any] | None = []

    def batches(self) -> Iterator[Any]:
        number = 0
        while self._held is not None:
            if number == len(self._held):
                if number == _HELD:
                    self._held = None
                    break
                try:
                    self._held.append(next(self._rest))
                except StopIteration:
                    return
            yield self._held[number]
            number += 1
        yield from self._rest
