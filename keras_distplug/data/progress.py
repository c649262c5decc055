"""The position of a `fit` in its data."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_distplug.backend.tensorflow.input import epochs, readers
from keras_distplug.backend.tensorflow.runtime import context, workers
from keras_distplug.core.log import announce
from keras_distplug.data import contents
from keras_distplug.data.feed import InputAdapter, get_seed, report_warnings
from keras_distplug.data.position import Positioned, Source
from keras_distplug.data.python_sources import PyData, warning_of_generator
from keras_distplug.data.sources import BATCH_SIZE, SEEDS, Arrays, TfData, elements
from keras_distplug.data.torch_sources import LoaderData


class Progress:
    """The position of a `fit` in its data, during the whole training.

    Args:
        loop: The loop of that `fit`.
        data: The data from which the loop draws batches.
        draws_again: True if the data is read from its very start, and draws the same numbers again:
            one Python generator yields the batches of all epochs.
    """

    def __init__(self, loop: epochs.Loop, data: Positioned, draws_again: bool) -> None:
        self.data = data
        self.draws_again = draws_again
        self._loop = loop
        self._passes = data.passes  # `_read` and `_behind` belong to the last of these
        self._read = 0
        self._behind = 0
        self._counted = loop.counted

    def on_epoch_begin(self) -> None:
        """Must be called before an epoch draws its first batch."""
        self._counted = self._loop.counted

    def trained(self, batches: int) -> None:
        """Must be called after every step."""
        if self.data.passes == self._passes and self.data.is_read:
            self._read += batches
            return
        read, self._behind = self._position_in_pass()
        self._read = read + batches
        self.data.note_read()
        self._passes = self.data.passes

    def position(self, *, in_epoch: bool) -> dict[str, Any]:
        """Returns the position from which `seek` continues; JSON-able.

        Args:
            in_epoch: True if the current epoch continues, even if it has no batch left.
        """
        place: dict[str, Any] = {
            "passes": self.data.passes,
            "passes_read": self.data.read,
            "batch_size": self.data.source.batch_size,
            "counted": {
                **self._loop.counted,
                **({"seen": self._counted["seen"]} if in_epoch else {}),
            },
        }
        in_pass = in_epoch or self._loop.continues
        if in_pass:
            read, place["behind"] = self._position_in_pass()
            place["passes_read"] = self.data.read_before
            place["read"] = min(read, self.data.source.num_batches or math.inf)
            # Nothing of a finished pass will be read again.
            in_pass = place["read"] != self.data.source.num_batches
        place["variables"] = self.data.variables(in_pass=in_pass)
        place["draws"] = self.data.source.draws
        return place

    def seek(self, position: Mapping[str, Any], batch: float) -> float:
        """Makes training continue from `position`.

        Args:
            position: A result of `position`.
            batch: Batches of the epoch that were trained; `math.inf` if it has none left.

        Returns:
            The `batch`, converted to batches of the current size.
        """
        if position["batch_size"] != self.data.source.batch_size:
            position, batch = self._convert_batches(position, batch)
        self._loop.count(position["counted"])
        self.data.source.draws |= position.get("draws", False)
        read, behind = position.get("read"), position.get("behind", 0)
        variables = position.get("variables", ())
        passes_read = position["passes_read"]
        if read is None or (batch == math.inf and not self._loop.keeps_iterator):
            passes_read += bool(read)
            self.data.begin_at(position["passes"], 0, variables=variables, read=passes_read)
        else:
            self.data.begin_at(position["passes"] - 1, read, behind, variables, passes_read)
            self._loop.prepare_next_epoch()
        self._passes, self._read, self._behind = position["passes"], read or 0, behind
        if batch:
            self._loop.begin_at(batch)
        return batch

    def _convert_batches(
        self, position: Mapping[str, Any], batch: float
    ) -> tuple[Mapping[str, Any], float]:
        source = self.data.source
        before, now = position["batch_size"], source.batch_size
        assert now is not None
        counted = {"seen": 0, "num_batches": source.num_batches}
        if "read" not in position:
            return {**position, "counted": counted}, batch
        behind = position["behind"] + before * position["read"]
        left = int(source.batches(position["passes"] - 1, 0, behind).cardinality().numpy())
        if batch != math.inf:
            batch = self._loop.batches_done(math.ceil(batch * before / now), left)
        if source.num_batches is not None:
            done = source.num_batches - left
            counted["seen"] = done - (int(batch) if batch != math.inf else 0)
        return {**position, "read": 0, "behind": behind, "counted": counted}, batch

    def note_end(self, position: Mapping[str, Any]) -> None:
        """Restores the state in which a `fit` that finished in another process left the data."""
        self.data.assign(position.get("variables", ()), in_pass=False)

    def _position_in_pass(self) -> tuple[int, int]:
        """Returns the batches read of the current pass, and the samples before these."""
        return (self._read, self._behind) if self.data.passes == self._passes else (0, 0)


def track_fit(model: keras.Model, seed: int) -> Progress | None:
    """Returns the progress of the current `fit`, counted from now on.

    Args:
        model: The model in training.
        seed: Seed for data that would otherwise be shuffled in an irreproducible order.

    Returns:
        The progress; None if `fit` is not Keras', or the data was already distributed.
    """
    if (loop := epochs.get_loop()) is None:
        return None
    is_generator = loop.is_generator
    data = _positioned(loop, model.distribute_strategy, seed)
    if data is None:
        return None
    _announce_orders(data.source, "training data")
    return Progress(loop, data, is_generator)


def take_over_early(model: keras.Model, seed: int) -> None:
    """Makes the data of a plain `fit` resumable before `fit` inspects it, if the workers read it
    themselves: Keras would read it on the chief.

    Args:
        model: The model that will be trained.
        seed: As in `track_fit`.
    """
    strategy = model.distribute_strategy
    if workers.is_scheduled(strategy):
        epochs.call_before_reading(model, lambda loop: _positioned(loop, strategy, seed))


def track_validation(model: keras.Model, seed: int) -> Positioned | None:
    """Returns the validation data of the current `fit`; passes over it are counted from now on."""
    loop = epochs.find_validation_loop(model)
    # Other data comes in the same order every time.
    if loop is None or not (loop.is_dataset or loop.py_dataset or loop.torch_loader):
        return None
    is_ours = isinstance(loop.dataset, Positioned)
    strategy = model.distribute_strategy
    if workers.is_scheduled(strategy):
        strategy = workers.make_chief_strategy()  # validates alone
    data = _positioned(loop, strategy, seed, is_validation=True)
    if data is not None and not is_ours:
        _announce_orders(data.source, "validation data")
    return data


def _announce_orders(source: Source, what: str) -> None:
    """Reports shuffles whose orders are not those of plain Keras."""
    if isinstance(source, TfData) and (titles := source.reordered):
        announce(
            f"every pass over the {what} reads the result of "
            f"{' and '.join(f'`{title}`' for title in titles)} several times, for example because "
            "of a `repeat`: from the second pass on, the order of the samples differs from that in "
            "plain Keras. A resumed run sees the same order as an uninterrupted one"
        )


def resume_validation(
    data: Positioned, passes: int, passes_read: int, variables: Sequence[Any], *, is_inspected: bool
) -> None:
    """Continues validation after passes of another process.

    Keras has already made its iterator over the data, and has reset it, as before every one of
    these passes; at that time the data had another state.
    """
    data.begin_at(passes, 0, read=passes_read)
    data.assign(variables, in_pass=False)
    if is_inspected:
        data.note_looked()  # as in the other process
    data.source.on_epoch_end()


def _positioned(
    loop: epochs.Loop, strategy: tf.distribute.Strategy, seed: int, *, is_validation: bool = False
) -> Positioned | None:
    if isinstance(loop.dataset, Positioned):
        return loop.dataset
    if (source := _source(loop, strategy, seed, is_validation)) is None:
        return None
    adapter = InputAdapter(source)
    adapter.get_tf_dataset().use(strategy)
    loop.draw_from(adapter)
    report_warnings(source, is_validation=is_validation)
    return adapter.get_tf_dataset()


def _source(
    loop: epochs.Loop, strategy: tf.distribute.Strategy, seed: int, is_validation: bool
) -> Source | None:
    if (given := loop.py_dataset) is not None:
        dataset, is_shuffled, class_weight, signature = given
        # Python's generators differ between workers, which must draw the same order.
        own = seed if workers.is_multi_worker(strategy) else None
        return PyData(
            dataset,
            is_shuffled,
            own,
            class_weight,
            signature,
            is_in_parts=loop.keeps_iterator,
            epochs_ended=loop.epochs_ended,
        )
    if (loader := loop.torch_loader) is not None:
        return LoaderData(loader)
    is_scheduled = workers.is_scheduled(strategy)
    if (loop.is_shuffled_at_random or is_scheduled) and (arrays := loop.arrays) is not None:
        is_shuffled = loop.is_shuffled_at_random or loop.is_shuffled_by_seed
        loop.release()
        return Arrays(*arrays, seed if is_shuffled else None)
    if (whole := loop.whole_dataset) is None:
        return None
    if loop.is_dataset:
        return TfData(whole, get_seed(whole, seed), is_validation=is_validation)
    seed_of_orders = context.global_seed() if loop.is_shuffled_by_seed else None
    return _KerasSource(
        whole,
        loop.adapter,
        loop.samples_in_order,
        seed=seed_of_orders,
        arrays=loop.given_arrays,
    )


class _KerasSource(Source):
    """The batches that Keras makes from data other than datasets. To resume, it is read again.

    Args:
        whole: Its batches.
        adapter: Keras' adapter, which makes the batches.
        sizes: The size of a batch and the number of samples, if the batch size does not affect the
            order of samples.
        seed: TensorFlow's global seed, if orders are drawn from it.
        arrays: The arrays given to `fit`, if any.
    """

    def __init__(
        self,
        whole: tf.data.Dataset,
        adapter: readers.DataAdapter,
        sizes: tuple[int, int] | None,
        *,
        seed: int | None,
        arrays: Any = None,
    ) -> None:
        self.whole = whole
        self._adapter = adapter
        self._kind = type(adapter).__name__
        self._sizes = sizes
        self.batch_size = None if sizes is None else sizes[0]
        self._seed = seed
        self._given = arrays
        self._iterators = 0

    @property
    def num_batches(self) -> int | None:
        count: int | None = self._adapter.num_batches
        return count

    @property
    def why_not_by_samples(self) -> str | None:
        return None if self._sizes else f"Keras' {self._kind} makes the batches"

    @property
    def why_not_on_workers(self) -> str:
        return f"Keras' {self._kind} makes the batches in this process"

    def batches(
        self, passed: int, start: int, behind: int = 0, read: int | None = None
    ) -> tf.data.Dataset:
        for _ in range(self._iterators, passed):
            iter(self.whole)
        self._iterators = passed + 1
        if not behind or self._sizes is None:
            if not start:
                return self.whole
            return readers.skip_first_batches(self.whole, self._adapter, start)
        batch_size, samples = self._sizes
        first = behind + start * batch_size
        rest = self.whole.unbatch().skip(first).batch(batch_size)
        left = math.ceil(max(0, samples - first) / batch_size)
        return rest.apply(tf.data.experimental.assert_cardinality(left))

    def _described(self) -> Mapping[str, Any]:
        length = {"batches": self.num_batches}
        if self._sizes is not None:
            length = dict(zip((BATCH_SIZE, "samples"), self._sizes, strict=True))
        seeds = {} if self._seed is None else {SEEDS: str(self._seed)}
        return {"kind": self._kind, **length, "elements": elements(self.whole), **seeds}

    @functools.cached_property
    def contents(self) -> Mapping[str, str]:
        return {} if self._given is None else contents.fingerprint_arrays(self._given)

    def use_seeds(self, seeds: str) -> bool:
        if self._seed is None:
            return False
        self._seed = int(seeds)
        with context.seeded(self._seed):
            self.whole = self._adapter.get_tf_dataset()
        return True

    def warnings(self) -> list[str]:
        is_generator = self._kind == "GeneratorDataAdapter"
        return [warning_of_generator(is_restarted=False)] if is_generator else []
