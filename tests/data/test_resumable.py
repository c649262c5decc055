"""Tests `resumable` data in a plain `Model.fit`, and the data of `distributed_fit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(240)]

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402
from data import inputs  # noqa: E402
from support import small  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.backend.tensorflow import trainer  # noqa: E402
from keras_distplug.core.errors import DataError  # noqa: E402
from keras_distplug.data.feed import InputAdapter, feed  # noqa: E402


@pytest.fixture(autouse=True)
def no_dispatch() -> Iterator[None]:
    yield
    trainer.remove_dispatch()


class Recorder(keras.callbacks.Callback):
    """Records the samples and position of every step; can start a `fit` at such a position."""

    def __init__(self, given: InputAdapter, place: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.positioned = given.get_tf_dataset()
        self.place = place
        self.sums: list[int] = []
        self.places: list[tuple[int, int]] = []

    def on_train_begin(self, logs: Any = None) -> None:
        if self.place is not None:
            self.positioned.begin_at(*self.place)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.sums.append(round(float(logs["ids"])))
        self.places.append((self.positioned.passes - 1, batch + 1))


class Summing(keras.Model):
    """Returns the sum of the numbers of its samples."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        x = batch[0] if isinstance(batch, tuple) else batch
        context = tf.distribute.get_replica_context()
        # Powers of two distinguish any sets of up to 30 samples.
        total = tf.reduce_sum(2.0 ** tf.cast(x, tf.float64))
        return {"ids": context.all_reduce(tf.distribute.ReduceOp.SUM, total)}

    def call(self, x: Any) -> Any:
        return x


def summing(strategy: tf.distribute.Strategy) -> keras.Model:
    with strategy.scope():
        model = Summing()
        model.compile(loss=None)
    return model


def fit(
    strategy: tf.distribute.Strategy,
    given: Any,
    place: tuple[int, int] | None = None,
    **more: Any,
) -> Recorder:
    seen = Recorder(given, place)
    summing(strategy).fit(given, callbacks=[seen], verbose=0, **more)
    return seen


def given(kind: str) -> Any:
    return {
        "tf.data": lambda: kd.resumable(inputs.PIPELINES["shuffle"]()),
        "arrays": lambda: kd.resumable(inputs.IDS, batch_size=4, seed=3),
        "PyDataset": lambda: kd.resumable(inputs.Batches()),
        "generator": lambda: kd.resumable(inputs.batches),
    }[kind]()


@pytest.mark.filterwarnings("ignore:A resumed run:UserWarning")
@pytest.mark.parametrize("kind", ["tf.data", "arrays", "PyDataset", "generator"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_fit_uses_the_models_strategy(kind: str, replicas: int) -> None:
    """A plain `fit` outside of any scope splits the batches over the replicas of its model, and can
    start at any batch of an epoch."""
    strategy = tf.distribute.get_strategy()
    if replicas == 2:
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    whole = fit(strategy, given(kind), epochs=3)
    assert len(whole.sums) == 24
    assert sum(whole.sums[:8]) == 2**inputs.SAMPLES - 1
    for at in (8, 11, 22):
        place = whole.places[at] if at % 8 else (whole.places[at][0], 0)
        rest = whole.sums[at + 1 : 24 // 8 * 8][: 8 - place[1]] if at % 8 else whole.sums[8:16]
        resumed = fit(strategy, given(kind), place, epochs=1, steps_per_epoch=len(rest))
        assert resumed.sums == rest


def test_distributed_fit_reads_the_same_batches() -> None:
    """`feed` and `resumable` give the same batches for the same seed."""
    model = small.model()
    for name in ("arrays", "tf.data", "PyDataset"):
        fed = feed(**{"y": None, **small.INPUTS[name]()}, model=model, seed=7).x
        ours = kd.resumable(**small.INPUTS[name](), seed=7)
        for _ in range(2):
            batches = [
                [[part.numpy().tobytes() for part in batch] for batch in each.get_tf_dataset()]
                for each in (fed, ours)
            ]
            assert batches[0] == batches[1]
            assert len(batches[0]) == small.BATCHES


def test_orders_depend_on_the_seed() -> None:
    """The orders of arrays, and of a shuffle without a seed, depend on the seed."""

    def order(given: Any) -> list[int]:
        return [int(i) for batch in given.get_tf_dataset() for i in tf.nest.flatten(batch)[0]]

    for make in (
        lambda seed: kd.resumable(inputs.IDS, batch_size=4, seed=seed),
        lambda seed: kd.resumable(inputs.PIPELINES["no seed"](), seed=seed),
    ):
        assert order(make(1)) == order(make(1)) != order(make(2))


def test_description_of_seeds() -> None:
    """Shuffles that get a seed from the run are reported."""
    model = small.model()
    tf.random.set_seed(None)
    dataset = tf.data.Dataset.from_tensor_slices((small.X, small.Y)).shuffle(30).batch(8)
    fed = feed(dataset, None, model=model, seed=1)
    assert fed.description == "tf.data, shuffle without a seed seeded by the run"


def test_one_warning_lists_everything() -> None:
    """One warning lists all irreproducible parts."""
    dataset = tf.data.Dataset.range(8).map(lambda i: (i, tf.random.uniform([])))
    with pytest.warns(
        UserWarning, match=r"map \(test_resumable.py, line \d+\): RandomUniform has no seed"
    ) as found:
        kd.resumable(dataset.batch(2))
    [warning] = found
    assert warning.filename == __file__


def test_epoch_hooks_cause_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Changes that a `PyDataset` makes outside itself between epochs cannot be restored."""

    class Shuffling(small.Batches):
        def on_epoch_end(self) -> None:
            np.random.shuffle(cache["x"])

    cache = {"x": np.arange(9)}
    small.model().fit(kd.resumable(Shuffling()), epochs=3, verbose=0)
    message = "Shuffling.on_epoch_end changed nothing that is saved"
    assert message in caplog.text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (lambda: {"x": tf.data.Dataset.range(3)}, "not batched"),
        (lambda: {"x": small.Batches(), "y": small.Y}, "`y` must be part of the dataset"),
        (lambda: {"x": small.dataset(), "batch_size": 3}, "`batch_size` applies to arrays"),
        (lambda: {"x": small.X, "y": small.Y[:3]}, "same number of samples"),
        (lambda: {"x": object()}, "a generator, a function that returns one, or"),
    ],
)
def test_bad_input(more: Callable[[], dict[str, Any]], message: str) -> None:
    """Invalid input is refused before anything is read."""
    with pytest.raises(DataError, match=message):
        kd.resumable(**more())


def test_too_few_samples() -> None:
    """Batches smaller than the number of replicas are refused when `fit` starts."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with pytest.raises(DataError, match="1 samples for 2 replicas"):
        fit(strategy, kd.resumable(inputs.IDS, batch_size=1))
