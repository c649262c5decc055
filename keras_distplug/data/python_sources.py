"""Sources whose batches Python code makes: `keras.utils.PyDataset` and generators."""

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
from keras_distplug.data.reached_state import Reached
from keras_distplug.data.sources import described_weights, elements
from keras_distplug.python_state import random_states
from keras_distplug.python_state.object_states import Attributes

_DATASET = "dataset"
_LOOKED_AT = 2  # batches of a pass that are watched for what they draw and change
_HELD = 32  # first batches of a generator, for passes that only look at them


class PyData(Source):
    """A `keras.utils.PyDataset` of global batches.

    Its attributes, what they lead to, and the global generators of Python and NumPy are part of
    the position. If making a batch draws random numbers, or changes any of these, resuming makes
    the earlier batches of the pass again.

    Args:
        dataset: The user's.
        shuffle: Draw a new order of its batches in each pass.
        seed: Of the orders; None draws them as Keras does, from Python's generator.
        class_weight: As in `Model.fit`.
        signature: As in `PyReader`.
        is_in_parts: Whether epochs end in the middle of a pass.
        epochs_ended: Epochs of this `fit` that have ended, from whose number Keras 3.16 draws its
            orders; None if it draws them from Python's generator.
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
        self._batches_at_start = self.num_batches  # before it changes itself
        self._shuffle = shuffle
        self._seed = seed
        self._is_in_parts = is_in_parts
        stock = keras.utils.PyDataset
        hooks = ("on_epoch_begin", "on_epoch_end")
        self._hooks = [
            name for name in hooks if getattr(type(dataset), name) is not getattr(stock, name)
        ]
        self._attributes = Attributes(dataset, vars(stock()), only_generators=not self._hooks)
        self._reached = Reached(dataset, {_DATASET: dataset}, {_DATASET: self._attributes})
        self._generators = _Generators(self)
        self._epochs = _Epochs(epochs_ended)
        self.variables = (self._attributes, self._generators, self._reached, self._epochs)
        self._told: set[str] = set()
        self._is_looked_at = False
        self._is_watched = False  # whether a second batch was
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
        epoch = self._epochs.begun if start else None
        if start and not self.draws:
            order = self._order(passed, epoch, self._generators.begun)
            dataset = self._reader.dataset(lambda: self._rest(start, order))
            return self._counted(dataset, start)
        dataset = self._reader.dataset(lambda: self._rest(0, self._order(passed, epoch)))
        return self._counted(dataset, 0).skip(start) if start else self._counted(dataset, 0)

    def _order(
        self, passed: int, epoch: int | None, begun: Mapping[str, Any] | None = None
    ) -> list[int] | None:
        """That of a pass.

        Args:
            passed: Passes before it.
            epoch: In which it began; None for the present one.
            begun: States of the global generators then; None for the present ones.
        """
        if (count := self.num_batches) is None or not self._shuffle:
            return None
        if self._seed is not None:
            return list(np.random.default_rng([self._seed, passed]).permutation(count))
        order = list(range(count))
        if self._epochs.ended is not None:
            random.Random(self._epochs.ended if epoch is None else epoch).shuffle(order)
        else:
            (random if begun is None else random_states.python_generator(begun)).shuffle(order)
        return order

    def _rest(self, start: int, order: Sequence[int] | None) -> _Rest:
        return _Rest(self._given, start, order, self._made)

    def _made(self, make: Callable[[], Any], *, is_first: bool) -> Any:
        """Makes one of the first two batches of a pass, and notes whether that changes what later
        ones depend on. The first one often opens files and the like, once."""
        if not is_first and self._is_watched:
            return make()
        self._is_watched |= not is_first

        def state() -> Any:
            own = self._attributes.generators() if is_first else self._kept()
            return random_states.capture_of_python(), own

        before = state()
        batch = make()
        if state() != before:
            if not self.draws and self._given.workers > 1:
                announce(
                    f"{type(self._given).__name__} draws random numbers in {self._given.workers} "
                    "workers concurrently, so batches get different numbers in every run. Use "
                    "workers=1, or seed a generator with the batch's index"
                )
            self.draws = True
        return batch

    def _kept(self) -> Any:
        return self._attributes.read(), self._reached.read()

    def _counted(self, dataset: tf.data.Dataset, start: int) -> tf.data.Dataset:
        if (count := self.num_batches) is None:
            return dataset
        return dataset.apply(tf.data.experimental.assert_cardinality(count - start))

    def on_epoch_begin(self) -> None:
        self._given.on_epoch_begin()

    def on_epoch_end(self) -> None:
        if self._epochs.ended is not None:
            self._epochs.ended += 1
        looks = "on_epoch_end" in self._hooks and not self._is_looked_at
        before = self._kept() if looks else None
        self._given.on_epoch_end()
        if looks:
            self._is_looked_at = True
            if self._kept() == before and not self._attributes.too_large():
                announce(
                    f"{type(self._given).__name__}.on_epoch_end changed nothing that is saved. If "
                    "it changes anything else, such as a dict of arrays or a file, a resumed run "
                    "will not restore it: keep what changes in an attribute, for example as an "
                    "array of indices"
                )
        for name in set(self._attributes.too_large() if self._hooks else ()) - self._told:
            self._told.add(name)
            announce(
                f"{type(self._given).__name__}.on_epoch_end changes `{name}`, which is too large "
                "to save. Shuffle an array of indices instead"
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
        return contents.of_object(self._given)

    def warnings(self) -> list[str]:
        return self._reached.warnings() + [
            f"with steps_per_epoch, {type(self._given).__name__}.{name} runs while batches of the "
            "next epoch are being prefetched, so which batches see its changes differs in every "
            "run. Leave out steps_per_epoch"
            for name in (self._hooks if self._is_in_parts else ())
        ]


class _Generators:
    """The global generators of Python and NumPy, of a source that may draw from them."""

    def __init__(self, source: PyData) -> None:
        self._source = source
        self.begun: Mapping[str, Any] | None = None  # what they were at the beginning of a pass

    def read(self) -> Any:
        return random_states.capture_of_python()

    def assign(self, value: Any, *, in_pass: bool) -> None:
        if not in_pass:
            return  # they go on with the process
        self.begun = value
        if self._source.draws:
            random_states.restore_of_python(value)


class _Epochs:
    """The number of epochs that have ended, if orders are drawn from it."""

    def __init__(self, ended: int | None) -> None:
        self.ended = ended
        self.begun = ended  # when the pass under way began

    def read(self) -> int | None:
        return self.ended

    def assign(self, value: Any, *, in_pass: bool) -> None:
        if value is None or self.ended is None:
            return  # of a Keras that draws its orders in the other way
        if in_pass:
            self.begun = value
        self.ended = max(self.ended, value)


class _Rest(keras.utils.PyDataset):  # type: ignore[misc]
    """The batches of a `PyDataset` in another order, from one of them on.

    Args:
        given: The user's.
        start: Batches that are left out.
        order: Of all batches.
        made: Makes the first ones that are asked for, with a function that gives one.
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
        self._asked = 0

    @property
    def num_batches(self) -> int | None:
        count = self._given.num_batches
        return None if count is None else count - self._start

    def __getitem__(self, index: int) -> Any:
        place = self._start + index
        number = place if self._order is None else int(self._order[place])
        self._asked += 1
        if self._made is None or self._asked > _LOOKED_AT:
            return self._given[number]
        return self._made(lambda: self._given[number], is_first=self._asked == 1)

    def __getstate__(self) -> dict[str, Any]:
        # A process of its own tells nobody what it has drawn.
        return {**vars(self), "_made": None}


class Generator(Source):
    """Batches of a Python generator, read over from the first one when training goes on.

    Args:
        make: Returns a generator of global batches; each pass has one of its own. Or a generator,
            which cannot be begun anew: all of training is one pass.
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
        return [warning_of_generator(is_begun_anew=bool(self._make))]


def warning_of_generator(*, is_begun_anew: bool) -> str:
    """A line for people on data from a Python generator, which every pass begins anew, or none."""
    drawn = "of the pass are drawn again" if is_begun_anew else "are drawn from a new generator"
    return (
        f"a Python generator: to resume, all batches up to the checkpoint {drawn}, which must "
        "yield the same as before. A keras.utils.PyDataset continues at any batch without "
        "making the earlier ones"
    )


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
