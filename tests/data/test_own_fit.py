"""Models whose class has its own `fit` or `compile`, like the tasks of KerasHub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from support import small  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.core.errors import ConfigurationError, DataError, ModelError  # noqa: E402

TEXTS = np.array(["a", "b", "c", "d"])[np.random.default_rng(1).integers(0, 4, size=30)]
Y = small.Y


@pytest.fixture(scope="module")
def mirrored() -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@keras.saving.register_keras_serializable("own_fit")
class Task(keras.Model):
    """Trains on texts, which its `fit` converts to numbers."""

    def __init__(self, rate: float = 0.3, **more: Any) -> None:
        super().__init__(**more)
        self.rate = rate
        self.table = keras.layers.Embedding(5, 3)
        self.drop = keras.layers.Dropout(rate)
        self.last = keras.layers.Dense(1)
        self.table.build((None,))
        self.last.build((None, 3))
        self.built = True

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name, "rate": self.rate}

    def call(self, numbers: Any, training: bool = False) -> Any:
        return self.last(self.drop(self.table(numbers), training=training))

    def fit(  # type: ignore[override]
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int = 8,
        epochs: int = 2,
        held_out: int = 0,
        **more: Any,
    ) -> Any:
        if isinstance(x, tf.data.Dataset):
            return super().fit(_numbered(x), epochs=epochs, **more)
        if held_out:
            more["validation_data"] = _numbered(_batched(x[-held_out:], y[-held_out:], batch_size))
            x, y = x[:-held_out], y[:-held_out]
        return super().fit(_numbered(_batched(x, y, batch_size)), epochs=epochs, **more)


def _batched(x: Any, y: Any, batch_size: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)


def _numbered(texts: tf.data.Dataset) -> tf.data.Dataset:
    def numbers(text: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.strings.to_hash_bucket_fast(text, 5), y

    return texts.map(numbers, num_parallel_calls=tf.data.AUTOTUNE).prefetch(1)


class Doubling(keras.Sequential):
    """Passes arrays to Keras' `fit`, which shuffles them."""

    def fit(self, x: Any, y: Any, **more: Any) -> Any:  # type: ignore[override]
        return super().fit(2 * x, y, **more)


def task(rate: float = 0.3, kind: type[Task] = Task) -> keras.Model:
    keras.utils.set_random_seed(5)
    model = kind(rate)
    model.compile("adam", "mse", metrics=["mae"])
    return model


def of(kind: type[keras.Sequential]) -> keras.Model:
    keras.utils.set_random_seed(5)
    model = kind([keras.Input((4,)), keras.layers.Dropout(0.3), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def texts() -> tf.data.Dataset:
    whole = tf.data.Dataset.from_tensor_slices((TEXTS, Y))
    return whole.shuffle(30, reshuffle_each_iteration=True).batch(8)


def saving(directory: Path) -> kd.BackupAndRestore:
    return kd.BackupAndRestore(directory, save_freq=1, on_busy="wait", delete_checkpoint=False)


GIVEN: dict[str, tuple[Callable[[], keras.Model], Callable[[], dict[str, Any]]]] = {
    "texts": (task, lambda: {"x": list(TEXTS), "y": Y, "batch_size": 4}),
    "held_out": (task, lambda: {"x": TEXTS, "y": Y, "held_out": 10, "epochs": 1}),
    "tf.data": (task, lambda: {"x": texts(), "validation_data": _numbered(texts())}),
    "arrays": (lambda: of(Doubling), lambda: {"x": small.X, "y": Y, "batch_size": 8, "epochs": 2}),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_trains_like_own_fit(kind: str, tmp_path: Path) -> None:
    """On one device, `distributed_fit` trains bit for bit like the model's own `fit`, with its
    arguments and defaults."""
    make, given = GIVEN[kind]
    expected = make()
    theirs = expected.fit(**given(), verbose=0)
    mine = make()  # sets the seeds for the orders again
    history = kd.distributed_fit(mine, **given(), directory=tmp_path, verbose=0)
    assert small.state(mine) == small.state(expected)
    assert history.history == theirs.history


@pytest.mark.parametrize("way", ["fit", "distributed_fit"])
@pytest.mark.parametrize("kind", ["texts", "tf.data", "arrays"])
def test_interrupted(kind: str, way: str, tmp_path: Path) -> None:
    """A run that is interrupted mid-epoch ends bit for bit like plain Keras, with `fit` and with
    `distributed_fit`."""
    make, given = GIVEN[kind]
    expected = make()
    theirs = expected.fit(**given(), verbose=0)

    def run(model: keras.Model, *more: keras.callbacks.Callback) -> keras.callbacks.History:
        callbacks = [saving(tmp_path), *more]
        if way == "fit":
            return model.fit(**given(), verbose=0, callbacks=callbacks)
        return kd.distributed_fit(model, **given(), verbose=0, callbacks=callbacks)

    with pytest.raises(small.Interrupted):
        run(make(), small.Stop(1, 1))
    resumed, counted = make(), small.Stop()
    history = run(resumed, counted)
    assert 0 < counted.batches < 8
    assert small.state(resumed) == small.state(expected)
    assert history.history == theirs.history


def test_on_replicas(mirrored: tf.distribute.Strategy, tmp_path: Path) -> None:
    """Two replicas train the same as one device, and the caller's model gets the result."""
    expected, mine = task(0.0), task(0.0)
    theirs = expected.fit(list(TEXTS), Y, verbose=0)
    history = kd.distributed_fit(
        mine, list(TEXTS), Y, directory=tmp_path, verbose=0, strategy=mirrored
    )
    assert history.model.distribute_strategy is mirrored
    for name, values in theirs.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-4)
    for a, b in zip(mine.weights, expected.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-6)


RESUMABLE: dict[str, Callable[[int], Any]] = {
    "arrays": lambda seed: kd.resumable(list(TEXTS), Y, batch_size=8, seed=seed),
    "tf.data": lambda seed: kd.resumable(texts(), seed=seed),
}


@pytest.mark.parametrize("kind", RESUMABLE)
def test_resumable(kind: str, tmp_path: Path) -> None:
    """The model's own `fit` may transform `resumable` arrays and datasets, whose orders follow from
    their seed; an interrupted run sees the same ones."""

    def run(name: str, *more: keras.callbacks.Callback, seed: int = 3) -> list[bytes]:
        model = task()
        tf.random.set_seed(None)
        callbacks = [saving(tmp_path / name), *more]
        model.fit(RESUMABLE[kind](seed), verbose=0, callbacks=callbacks)
        return small.state(model)

    expected = run("undisturbed")
    with pytest.raises(small.Interrupted):
        run("interrupted", small.Stop(1, 1))
    assert run("interrupted") == expected
    assert run("other seed", seed=4) != expected


def test_resumable_that_cannot_be_transformed() -> None:
    """Other kinds of `resumable` data raise an error with a remedy before any training."""

    def batches() -> Any:
        yield small.X[:8], Y[:8]

    for given, kind in ((small.Batches(), "Batches"), (batches, "function")):
        data, counted = kd.resumable(given), small.Stop()
        with pytest.raises(DataError, match=rf"of a {kind} to reach .* without `resumable`"):
            task().fit(data, verbose=0, callbacks=[counted])
        with pytest.raises(AttributeError, match=r"attribute `map`\. .* without `resumable`"):
            data.map(_numbered)
        assert counted.batches == 0


class Closed(keras.Sequential):
    """Accepts no callbacks."""

    def fit(self, x: Any, y: Any, epochs: int = 1) -> Any:  # type: ignore[override]
        return super().fit(x, y, epochs=epochs, verbose=0)


class Forgetful(keras.Sequential):
    """Loses its callbacks."""

    def fit(self, x: Any, y: Any, **more: Any) -> Any:  # type: ignore[override]
        return super().fit(x, y, **{**more, "callbacks": None})


class Strict(Task):
    """Accepts only the arguments that it names."""

    def fit(self, x: Any, y: Any, callbacks: Any, steps_per_epoch: int) -> Any:  # type: ignore[override]
        return super().fit(x, y, callbacks=callbacks, steps_per_epoch=steps_per_epoch)


def test_arguments_that_fit_does_not_accept(tmp_path: Path) -> None:
    """A `fit` that does not accept callbacks or the given arguments is an error before any
    training; one that loses its callbacks causes a warning."""
    counted = small.Stop()
    given = {"directory": tmp_path, "callbacks": [counted]}
    with pytest.raises(ModelError, match=r"Closed.fit to take `callbacks`.*super\(\).fit"):
        kd.distributed_fit(of(Closed), small.X, Y, **given)
    with pytest.raises(ConfigurationError, match=r"Strict.fit\(.*Received: x, y, steps.*held_in"):
        kd.distributed_fit(task(kind=Strict), TEXTS, Y, steps_per_epoch=2, held_in=2, **given)
    with pytest.raises(ConfigurationError, match=r"Received: epoch.*Sequential does not"):
        kd.distributed_fit(small.model(), small.X, Y, epoch=3, **given)
    with pytest.raises(ConfigurationError, match=r"Received: epoch.*Sequential does not"):
        kd.distributed_fit(small.model, small.X, Y, epoch=3, **given)
    assert counted.batches == 0
    with pytest.warns(UserWarning, match="Forgetful.fit did not pass `callbacks`"):
        kd.distributed_fit(of(Forgetful), small.X, Y, verbose=0, **given)
