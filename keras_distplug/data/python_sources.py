"""Sources whose batches are made by Python code: `keras.utils.PyDataset` and generators."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_distplug.backend.tensorflow.input import readers
from keras_distplug.core.log import announce
from keras_distplug.data import contents
from keras_distplug.data.position import Source
from keras_distplug.data.reachable_state import ReachableState
from keras_distplug.data.sources import described_weights, elements
from keras_distplug.python_state import random_states
from keras_distplug.python_state.object_states import Attributes

_DATASET = "dataset"
_WATCHED = 2  # batches of a pass that are watched for drawing numbers and changing state
_HELD = 32  # first batches of a generator, kept for passes that only inspect them


class PyData(Source):
    """A `keras.utils.PyDataset` of global batches.

    The position includes its attributes, the objects reachable from them, and the global generators
    of Python and NumPy. If making a batch draws random numbers, or changes any of these, resuming
    makes the earlier batches of the pass again.

    Args:
        dataset: The user's data set.
        shuffle: True to draw a new order of its batches in every pass.
        seed: Seed of the orders; None draws them like Keras, from Python's generator.
        class_weight: As in `Model.fit`.
        signature: As in `PyReader`.
        is_in_parts: True if epochs end mid-pass.
        epochs_ended: Number of epochs of this `fit` that have ended, from which Keras 3.16 draws
            its orders; None if it draws them from Python's generator.
    """

    def __init__(
        self,
        dataset: keras.utils.PyDataset,
        shuffle: bool,
        seed: int | None,
        class_weight: dict[int, float] | None = None,
        signature: Any = None,
        *,
        is_in_parts: bool = False,
        epochs_ended: int | None = None,
    ) -> None:
        self._given = dataset
        self._batches_at_start = self.num_batches  # it may change later
        self._shuffle = shuffle
        self._seed = seed
        self._is_in_parts = is_in_parts
        stock = keras.utils.PyDataset
        hooks = ("on_epoch_begin", "on_epoch_end")
        self._hooks = [
            name for name in hooks if getattr(type(dataset), name) is not getattr(stock, name)
        ]
        self._attributes = Attributes(dataset, vars(stock()), only_generators=not self._hooks)
        self._reachable = ReachableState(dataset, {_DATASET: dataset}, {_DATASET: self._attributes})
        self._generators = _Generators(self)
        self._epochs = _Epochs(epochs_ended)
        self.variables = (self._attributes, self._generators, self._reachable, self._epochs)
        self._reported: set[str] = set()
        self._is_inspected = False
        self._is_watched = False  # True once a second batch was watched
        self._class_weight = class_weight
        self._reader = readers.PyReader(self._rest(0, None), class_weight, signature)
        self.whole = self._counted(self._reader.whole, 0)

    @property
    def num_batches(self) -> int | None:
        count: int | None = self._given.num_batches
        return count

    @property
    def why_not_by_samples(self) -> str:
        return f"{type(self._given).__name__} makes the batches"

    @property
    def why_not_on_workers(self) -> str:
        return f"the Python code of {type(self._given).__name__} is in this process"

    def batches(
        self, passed: int, start: int, behind: int = 0, read: int | None = None
    ) -> tf.data.Dataset:
        if not start and not self._shuffle:
            return self.whole
        epoch = self._epochs.at_start if start else None
        if start and not self.draws:
            order = self._order(passed, epoch, self._generators.initial)
            dataset = self._reader.dataset(lambda: self._rest(start, order))
            return self._counted(dataset, start)
        dataset = self._reader.dataset(lambda: self._rest(0, self._order(passed, epoch)))
        return self._counted(dataset, 0).skip(start) if start else self._counted(dataset, 0)

    def _order(
        self, passed: int, epoch: int | None, initial: Mapping[str, Any] | None = None
    ) -> list[int] | None:
        """Returns the order of a pass.

        Args:
            passed: The number of passes before it.
            epoch: The epoch in which it started; None for the current one.
            initial: The states of the global generators at that time; None for the current ones.
        """
        if (count := self.num_batches) is None or not self._shuffle:
            return None
        if self._seed is not None:
            return list(np.random.default_rng([self._seed, passed]).permutation(count))
        order = list(range(count))
        if self._epochs.ended is not None:
            if epoch is None:
                # Like Keras: once the first batch is requested, which may be an epoch later than
                # the iterator was made.
                epoch = self._epochs.at_start = self._epochs.ended
            random.Random(epoch).shuffle(order)
        else:
            (random if initial is None else random_states.python_generator(initial)).shuffle(order)
        return order

    def _rest(self, start: int, order: Sequence[int] | None) -> _Rest:
        return _Rest(self._given, start, order, self._made)

    def _made(self, make: Callable[[], Any], *, is_first: bool) -> Any:
        """Makes one of the first two batches of a pass, and records whether that changes state that
        later ones depend on. The first one often opens files and the like, only once."""
        if not is_first and self._is_watched:
            return make()
        self._is_watched |= not is_first

        def state() -> Any:
            own = self._attributes.generators() if is_first else self._kept()
            return random_states.capture_python(), own

        before = state()
        batch = make()
        if state() != before:
            if not self.draws and self._given.workers > 1:
                announce(
                    f"{type(self._given).__name__} draws random numbers or changes its state while "
                    f"it makes batches concurrently (its argument workers={self._given.workers}), "
                    "so batches may differ from run to run. Give it workers=1, or make every batch "
                    "depend only on its index, for example with a generator seeded by the index"
                )
            self.draws = True
        return batch

    def _kept(self) -> Any:
        return self._attributes.read(), self._reachable.read()

    def _counted(self, dataset: tf.data.Dataset, start: int) -> tf.data.Dataset:
        if (count := self.num_batches) is None:
            return dataset
        return dataset.apply(tf.data.experimental.assert_cardinality(count - start))

    def on_epoch_begin(self) -> None:
        self._given.on_epoch_begin()

    def on_epoch_end(self) -> None:
        if self._epochs.ended is not None:
            self._epochs.ended += 1
        inspects = "on_epoch_end" in self._hooks and not self._is_inspected
        before = self._kept() if inspects else None
        self._given.on_epoch_end()
        if inspects:
            self._is_inspected = True
            if self._kept() == before and not self._attributes.too_large():
                announce(
                    f"{type(self._given).__name__}.on_epoch_end changed nothing that is saved. If "
                    "it changes anything else, such as a dict of arrays or a file, a resumed run "
                    "will not restore it: keep such values in attributes that are numbers, text or "
                    "arrays, for example in an array of indices"
                )
        for name in set(self._attributes.too_large() if self._hooks else ()) - self._reported:
            self._reported.add(name)
            announce(
                f"{type(self._given).__name__}: `{name}` changes during training, but is too "
                "large to save, so a resumed run starts with its initial value. Shuffle an array "
                "of indices instead"
            )

    def _described(self) -> Mapping[str, Any]:
        return {
            "kind": "PyDataset",
            "class": type(self._given).__name__,
            "batches": self._batches_at_start,
            "elements": elements(self.whole),
            "shuffle": self._shuffle,
            **described_weights(self._class_weight),
        }

    holds_state = True

    @functools.cached_property
    def contents(self) -> Mapping[str, str]:
        return contents.fingerprint_object(self._given)

    def warnings(self) -> list[str]:
        return self._reachable.warnings() + [
            f"with steps_per_epoch, {type(self._given).__name__}.{name} runs while batches of the "
            "next epoch are being prefetched, so which batches see its changes differs in every "
            "run. Remove steps_per_epoch"
            for name in (self._hooks if self._is_in_parts else ())
        ]


class _Generators:
    """The global generators of Python and NumPy, for a source that may draw from them."""

    def __init__(self, source: PyData) -> None:
        self._source = source
        self.initial: Mapping[str, Any] | None = None  # their states at the start of a pass

    def read(self) -> Any:
        return random_states.capture_python()

    def assign(self, value: Any, *, in_pass: bool) -> None:
        if not in_pass:
            return  # they continue with the process
        self.initial = value
        if self._source.draws:
            random_states.restore_python(value)


class _Epochs:
    """The number of epochs that have ended, if orders are drawn from it."""

    def __init__(self, ended: int | None) -> None:
        self.ended = ended
        self.at_start = ended  # at the start of the current pass

    def read(self) -> Any:
        return self.ended

    def read_in_pass(self, started: Any) -> Any:
        # With steps_per_epoch, epochs end within a pass.
        return None if self.ended is None else [self.at_start, self.ended]

    def assign(self, value: Any, *, in_pass: bool) -> None:
        if value is None or self.ended is None:
            return  # saved by a Keras version that draws orders in the other way
        start, ended = value if isinstance(value, list) else (value, value)
        if in_pass:
            self.at_start = start
        self.ended = max(self.ended, ended)


class _Rest(keras.utils.PyDataset):  # type: ignore[misc]
    """The batches of a `PyDataset` in another order, starting at one of them.

    Args:
        given: The user's data set.
        start: Number of batches to skip.
        order: The order of all batches.
        made: Called with a function that makes a batch, for the first batches requested.
    """

    def __init__(
        self,
        given: keras.utils.PyDataset,
        start: int,
        order: Sequence[int] | None,
        made: Callable[..., Any],
    ) -> None:
        super().__init__(
            workers=given.workers,
            use_multiprocessing=given.use_multiprocessing,
            max_queue_size=given.max_queue_size,
        )
        self._given = given
        self._start = start
        self._order = order
        self._made: Callable[..., Any] | None = made
        self._requested = 0

    @property
    def num_batches(self) -> int | None:
        count = self._given.num_batches
        return None if count is None else count - self._start

    def __getitem__(self, index: int) -> Any:
        place = self._start + index
        number = place if self._order is None else int(self._order[place])
        self._requested += 1
        if self._made is None or self._requested > _WATCHED:
            return self._given[number]
        return self._made(lambda: self._given[number], is_first=self._requested == 1)

    def __getstate__(self) -> dict[str, Any]:
        # Another process cannot report the numbers it has drawn.
        return {**vars(self), "_made": None}


class Generator(Source):
    """Batches of a Python generator, read again from the first one to resume training.

    Args:
        make: Returns a generator of global batches; every pass makes a new one. Or a generator,
            which cannot be restarted: all of training is one pass.
        class_weight: As in `Model.fit`.
    """

    num_batches = None
    why_not_by_samples = "a Python generator makes the batches"
    why_not_on_workers = "the Python generator is in this process"

    def __init__(
        self,
        make: Callable[[], Iterator[Any]] | Iterator[Any],
        class_weight: dict[int, float] | None = None,
    ) -> None:
        self._class_weight = class_weight
        self._make = make if callable(make) else None
        self._reader = readers.GeneratorReader(make() if callable(make) else make)
        self._one = _OnePass(self._reader.rest())
        self.whole = self.batches(0, 0)

    def batches(
        self, passed: int, start: int, behind: int = 0, read: int | None = None
    ) -> tf.data.Dataset:
        dataset = self._reader.dataset(lambda: self._read(start))
        return readers.class_weighted(dataset, self._class_weight)

    def _read(self, start: int) -> Iterator[Any]:
        batches = self._one.batches() if self._make is None else self._make()
        for number, batch in enumerate(batches):
            if number >= start:
                yield batch

    def _described(self) -> Mapping[str, Any]:
        return {
            "kind": "generator",
            "elements": elements(self.whole),
            **described_weights(self._class_weight),
        }

    def warnings(self) -> list[str]:
        return [warning_of_generator(is_restarted=bool(self._make))]


def warning_of_generator(*, is_restarted: bool) -> str:
    """Returns a warning about a Python generator that restarts in every pass, or never."""
    drawn = "of the pass are drawn again" if is_restarted else "are drawn from a new generator"
    return (
        f"a Python generator: to resume, all batches up to the checkpoint {drawn}, which must "
        "yield the same as before. A keras.utils.PyDataset continues at any batch without "
        "making the earlier ones"
    )


class _OnePass:
    """The batches of a generator, which can be read again from the first one as long as only a few
    were read.

    Keras inspects a batch, for its shapes, before it trains.
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
