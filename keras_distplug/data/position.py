"""A position in the data of a training job, and how to return to it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import tensorflow as tf

from keras_distplug.backend.tensorflow.input import earlier_passes, readers
from keras_distplug.backend.tensorflow.input.iterators import end_beside
from keras_distplug.backend.tensorflow.runtime import workers
from keras_distplug.core.errors import DataError


class Variable(Protocol):
    """A value outside the elements that determines the next ones."""

    def read(self) -> Any:
        """Returns the value, JSON-able."""
        ...

    def assign(self, value: Any, *, in_pass: bool) -> None:
        """Restores a value from `read`: from the start of a pass, to continue within the pass, or
        from any other time."""
        ...


@runtime_checkable
class ChangesInPass(Protocol):
    """A `Variable` that may change within a pass, for example at the end of an epoch."""

    def read_in_pass(self, started: Any) -> Any:
        """Returns the value to continue within the pass, JSON-able; `started` is the value at its
        start."""
        ...


class Source:
    """Data that can be read again from any batch of any pass.

    A pass is the elements of one iterator. Keras makes more of them than there are epochs.

    Attributes:
        whole: A pass, for its element spec and size. It is never iterated.
        batch_size: Samples in a full global batch; None if unknown.
        variables: Values that reading it changes, such as the seeds of random layers.
        holds_state: True if reading it may change its `contents`.
        draws: True if its batches are known to depend on numbers drawn for earlier ones, so that
            these must be made again to continue a pass.
    """

    whole: tf.data.Dataset
    batch_size: int | None = None
    variables: Sequence[Variable] = ()
    holds_state = False
    draws = False

    @property
    def num_batches(self) -> int | None:
        """The number of batches in a pass; None if unknown or infinite."""
        raise NotImplementedError

    @property
    def why_not_by_samples(self) -> str | None:
        """The reason why a pass cannot be started after a number of samples; None if it can."""
        return None

    @property
    def why_not_on_workers(self) -> str | None:
        """The reason why other processes cannot read it themselves; None if they can."""
        return None

    def batches(
        self, passed: int, start: int, behind: int = 0, read: int | None = None
    ) -> tf.data.Dataset:
        """Returns the global batches of the next pass. The caller makes one iterator of them;
        before that, it may ask for the same pass again.

        Args:
            passed: Number of earlier passes. It grows by at least one from call to call.
            start: Batches of this pass that were trained; the dataset starts after them.
            behind: Samples of this pass that were trained before these, in batches of other sizes.
            read: Number of earlier passes of which a batch was read; None for all of them.
        """
        raise NotImplementedError

    def build_for_worker(self, worker: tf.Tensor, workers: int, seed: tf.Tensor) -> tf.data.Dataset:
        """Does the same as `LateDistributedDataset.build_for_worker`."""
        raise NotImplementedError(self.why_not_on_workers)

    def fingerprint(self) -> Mapping[str, Any]:
        """Returns the facts that must not change when the run resumes; flat and JSON-able."""
        return {**self._described(), **self.contents}

    def _described(self) -> Mapping[str, Any]:
        """Returns `fingerprint` without the contents."""
        raise NotImplementedError

    @functools.cached_property
    def contents(self) -> Mapping[str, str]:
        """Fingerprints of its samples, as in `data.contents`; empty if unknown."""
        return {}

    def use_seeds(self, seeds: str) -> bool:
        """Draws orders from these seeds, taken from its `fingerprint` in another process. Returns
        True if it can."""
        return False

    def warnings(self) -> list[str]:
        """Returns messages about parts that a resumed run may not reproduce, or only at a cost."""
        return []

    def on_epoch_begin(self) -> None:
        """Must be called when an epoch starts."""

    def on_epoch_end(self) -> None:
        """Must be called when an epoch has ended."""

    # Other code may read the same data, too, so iterators of it are counted.

    def note_made(self, passed: int) -> None:
        """Must be called for every iterator, with the number of earlier ones."""

    def note_read(self, read: int) -> None:
        """Must be called at an iterator's first batch, with the number of earlier ones read."""

    def note_looked(self, passed: int, read: int) -> None:
        """Must be called where plain Keras would inspect a batch, with the earlier passes."""


class Positioned(readers.LateDistributedDataset):
    """A source as read by `fit`, which counts the iterators made of it.

    Args:
        source: The data.
        fetches_ahead: True to prepare the next batch while a step computes, in addition to
            TensorFlow's own prefetching.
    """

    def __init__(self, source: Source, *, fetches_ahead: bool = False) -> None:
        self.source = source
        self._fetches_ahead = fetches_ahead
        self.passes = 0
        self.read = 0  # passes of which a batch was read
        self.is_read = False  # True if the last one is among these
        self.is_scheduled = False  # True if workers read it, and this process doesn't; set by `use`
        self._start = self._behind = 0
        self._given: Sequence[Any] = ()  # values of variables for the next iterator
        self._started_with: list[Any] = []
        self._strategy: tf.distribute.Strategy | None = None
        self._dataset: tf.data.Dataset | None = None
        self._distributed: Any = None

    def use(self, strategy: tf.distribute.Strategy) -> None:
        """Distributes by `strategy`, instead of the strategy in whose scope it is read.

        Raises:
            DataError: If a batch has fewer samples than there are replicas.
        """
        samples, replicas = self.source.batch_size, strategy.num_replicas_in_sync
        if samples is not None and samples < replicas:
            raise DataError(
                "The global batch is smaller than the number of replicas. Received: batches of "
                f"{samples} samples for {replicas} replicas. Use batches of at least {replicas}: "
                "the global batch is split over the replicas."
            )
        self.is_scheduled = workers.is_scheduled(strategy)
        if self.is_scheduled:
            if (why_not := self.source.why_not_on_workers) is not None:
                raise DataError(
                    "Under ParameterServerStrategy, every worker reads the data itself, but "
                    f"{why_not}. Give arrays, a tf.data.Dataset that only uses TensorFlow "
                    "operations, or a function that returns one."
                )
            strategy = workers.make_chief_strategy()
        if strategy is not self._strategy:
            self._strategy, self._dataset = strategy, None

    def build_for_worker(self, worker: tf.Tensor, workers: int, seed: tf.Tensor) -> tf.data.Dataset:
        return self.source.build_for_worker(worker, workers, seed)

    def variables(self, *, in_pass: bool) -> list[Any]:
        """Returns the `variables` for `begin_at`; JSON-able.

        Args:
            in_pass: True for those of the current pass, False for those of the next one.
        """
        if not in_pass:
            return [each.read() for each in self.source.variables]
        started = zip(self.source.variables, self._started_with, strict=False)
        return [
            each.read_in_pass(value) if isinstance(each, ChangesInPass) else value
            for each, value in started
        ]

    def assign(self, variables: Sequence[Any], *, in_pass: bool) -> None:
        """Restores the values from `variables`."""
        for each, value in zip(self.source.variables, variables, strict=False):
            each.assign(value, in_pass=in_pass)

    def note_read(self) -> None:
        """Must be called once a batch of the last pass was read; further calls have no effect."""
        if not self.is_read:
            self.source.note_read(self.read)
            self.read += 1
            self.is_read = True

    def note_looked(self) -> None:
        self.source.note_looked(self.passes, self.read)

    @property
    def read_before(self) -> int:
        """The number of passes before the last one of which a batch was read."""
        return self.read - self.is_read

    def begin_at(
        self,
        passed: int,
        start: int,
        behind: int = 0,
        variables: Sequence[Any] = (),
        read: int | None = None,
    ) -> None:
        """Makes the next iterator that of the pass after `passed` others, from batch `start` on,
        counted after `behind` samples.

        Args:
            passed: Number of earlier passes.
            start: Batches of it that were trained.
            behind: Samples of it that were trained before these.
            variables: Values at the start of that pass, from `variables`.
            read: Number of earlier passes of which a batch was read; None for all of them.

        Raises:
            DataError: If the pass has fewer batches.
        """
        batches = self.source.num_batches
        if batches is not None and start > batches:
            raise DataError(
                f"Training resumes after batch {start} of its data, but the data has only "
                f"{batches} batches. Give the same data as before."
            )
        self.passes, self._start, self._behind = passed, start, behind
        self._given = variables
        self.read, self.is_read = passed if read is None else read, False

    def __iter__(self) -> Iterator[Any]:
        if self.is_scheduled:
            self.passes += 1
            return iter(())
        in_pass = bool(self._start or self._behind)
        # The variables, if any, are those after this pass.
        is_over = bool(self._start) and self._start == self.source.num_batches
        given, self._given = list(self._given), ()
        self.assign(given, in_pass=in_pass)
        now = [each.read() for each in self.source.variables]
        self._started_with = given if given and in_pass else now
        dataset = self.source.batches(self.passes, self._start, self._behind, self.read)
        self.is_read = False
        if is_over:
            self.read, self.is_read = self.read + 1, True
        else:
            self.source.note_made(self.passes)
            if in_pass:
                self.note_read()
        self._start = self._behind = 0
        self._distribute(dataset)
        self.passes += 1
        with earlier_passes.paused():
            iterator: Iterator[Any] = iter(self._distributed)
        end_beside(iterator)
        return iterator

    @property
    def element_spec(self) -> Any:
        if self._dataset is None:
            self._distribute(self.source.whole)
        return self._distributed.element_spec

    def reduce(self, initial_state: Any, reduce_func: Callable[..., Any]) -> Any:
        for each in self:
            initial_state = reduce_func(initial_state, each)
        return initial_state

    def _distribute(self, dataset: tf.data.Dataset) -> None:
        if self._strategy is None:
            self.use(tf.distribute.get_strategy())
        if dataset is not self._dataset:
            self._dataset = dataset
            strategy = self._strategy
            assert strategy is not None
            # A position counts trained batches, so it does not matter how many are prefetched.
            read = dataset.prefetch(1) if self._fetches_ahead else dataset
            self._distributed = strategy.experimental_distribute_dataset(sharded(read))


def is_own_part(data: Any) -> bool:
    """Returns True if every worker may read different data."""
    if isinstance(data, Positioned):
        data = data.source.whole
    if not isinstance(data, tf.data.Dataset):
        return isinstance(data, tf.distribute.DistributedDataset)
    chosen = data.options().experimental_distribute.auto_shard_policy
    return bool(chosen == tf.data.experimental.AutoShardPolicy.OFF)


def count_batches(data: Any) -> int | None:
    """Returns the number of batches in this process's dataset; None if unknown or infinite."""
    if isinstance(data, Positioned):
        return data.source.num_batches
    cardinality = data.cardinality  # a number in a distributed dataset
    count = int(cardinality() if callable(cardinality) else cardinality)
    return count if count >= 0 else None


def sharded(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Splits every global batch over the workers, unless the user chose otherwise."""
    policy = tf.data.experimental.AutoShardPolicy
    chosen = dataset.options().experimental_distribute.auto_shard_policy
    if chosen not in (policy.AUTO, policy.DATA):
        return dataset
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy.DATA
    return dataset.with_options(options)
