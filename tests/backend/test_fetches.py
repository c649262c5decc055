"""Fetching a worker's next batch, and timing the wait for its own data."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]

import tensorflow as tf  # noqa: E402
from tensorflow.python.distribute import input_lib  # noqa: E402

from keras_distplug.backend.tensorflow.replicas import steps  # noqa: E402
from keras_distplug.core.errors import DataError  # noqa: E402


@pytest.fixture
def model() -> Any:
    return SimpleNamespace(distribute_strategy=tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))


def of_this_worker(samples: int, there: int, steps: int) -> tuple[int, int, int]:
    return samples, there, steps


def taken(
    model: Any, distributed: Any, sums: steps.Sums = of_this_worker
) -> list[tuple[list[list[int]], int]]:
    """Returns the shapes of all replicas' batches and the total number of samples, per step."""
    strategy, iterator = model.distribute_strategy, iter(distributed)
    found = []

    def note(given: Any) -> None:
        batch, total = given
        shapes = [each.shape.as_list() for each in strategy.experimental_local_results(batch)]
        found.append((shapes, total))

    try:
        while True:
            steps._run_next_step(model, note, sums, iterator)
    except tf.errors.OutOfRangeError:
        return found


def test_listeners(model: Any) -> None:
    """Every listener is called for every fetch, including the last empty one, until removed."""
    one: list[float] = []
    other: list[float] = []
    steps.add_fetch_listener(model, one.append)
    steps.add_fetch_listener(model, other.append)
    numbers = tf.data.Dataset.range(8).batch(4)
    batches = model.distribute_strategy.experimental_distribute_dataset(numbers)
    assert taken(model, batches) == [([[2], [2]], 4)] * 2
    steps.remove_fetch_listener(model, one.append)
    taken(model, batches)
    assert (len(one), len(other)) == (3, 6)


def test_replica_without_a_batch(model: Any) -> None:
    """A replica without a batch gets no samples, even if all batches have the same number and an
    unknown size."""
    rows = tf.data.Dataset.range(6).map(lambda number: tf.range(number))
    batches = rows.padded_batch(2, drop_remainder=True)
    assert batches.element_spec.shape.as_list() == [2, None]
    distributed = model.distribute_strategy.distribute_datasets_from_function(lambda _: batches)
    assert taken(model, distributed) == [([[2, 1], [2, 3]], 4), ([[2, 5], [0, 0]], 2)]


def of_global_batches(model: Any, policy: str, *, are_full: bool = True) -> Any:
    """Returns four global batches of 4 samples, distributed."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(
        tf.data.experimental.AutoShardPolicy, policy
    )
    batches = tf.data.Dataset.range(16).batch(4, drop_remainder=are_full).with_options(options)
    return model.distribute_strategy.experimental_distribute_dataset(batches)


@pytest.mark.parametrize(
    ("policy", "are_full", "are_same", "agreements"),
    [
        ("DATA", True, True, 2),
        ("DATA", True, False, 5),  # another worker has more or fewer batches
        ("DATA", False, True, 5),  # the last batch may be smaller
        ("OFF", True, True, 5),  # another worker may have other batches
    ],
)
def test_agreements(
    policy: str, are_full: bool, are_same: bool, agreements: int, model: Any
) -> None:
    """Workers agree on every batch, or only on the first one and the end if all of them know that
    their batches are full."""
    made: list[int] = []

    def sums(samples: int, there: int, steps: int) -> tuple[int, int, int]:
        made.append(steps)
        return samples, there, steps if are_same else 0

    batches = of_global_batches(model, policy, are_full=are_full)
    assert taken(model, batches, sums) == [([[2], [2]], 4)] * 4
    assert len(made) == agreements


def test_endless_batches(model: Any) -> None:
    """The number of steps agreed on at a time is limited, and workers then agree again."""
    made: list[int] = []

    def sums(samples: int, there: int, steps: int) -> tuple[int, int, int]:
        made.append(steps)
        return samples, there, 3

    endless = tf.data.Dataset.range(4).repeat().batch(2, drop_remainder=True)
    iterator = iter(model.distribute_strategy.distribute_datasets_from_function(lambda _: endless))
    for _ in range(7):
        steps._run_next_step(model, lambda given: given, sums, iterator)
    assert made == [2**16] * 3


def test_fewer_batches_than_announced(model: Any) -> None:
    """An iterator that ends before the agreed number of steps raises an error: other workers
    would wait in the collectives of a step that never comes."""
    batches = of_global_batches(model, "DATA")
    with pytest.raises(DataError, match="Expected 96 more batches"):
        taken(model, batches, lambda samples, there, steps: (samples, there, 100))


def test_upstream() -> None:
    """TensorFlow's dummy for such a batch has samples; once it has none, `_without_samples` is no
    longer needed."""
    assert input_lib._dummy_tensor_fn(tf.TensorSpec([2, None], tf.int64)).shape == [2, 0]
