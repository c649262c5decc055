"""Datasets that were read before `fit`: a shuffle draws another order every time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
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
from keras_distplug.backend.tensorflow import trainer  # noqa: E402
from keras_distplug.backend.tensorflow.input import earlier_passes  # noqa: E402


@pytest.fixture(autouse=True)
def plain_keras() -> None:
    """Uses plain Keras until a test uses our callbacks."""
    trainer.remove_dispatch()


Callbacks = Callable[[str], list[keras.callbacks.Callback]]


def shuffled() -> tf.data.Dataset:
    """Two shuffles: the second draws when its iterator is made, the first when it is read."""
    keras.utils.set_random_seed(5)
    whole = tf.data.Dataset.from_tensor_slices((small.X, small.Y)).shuffle(30, seed=1)
    return whole.map(lambda x, y: (2 * x, y)).shuffle(8, seed=2).batch(8)


def adapted(callbacks: Callbacks) -> Any:
    train = shuffled()
    normalize = keras.layers.Normalization()
    normalize.adapt(train.map(lambda x, y: x))
    next(iter(train.take(1)))
    model = small.model()
    train = train.map(lambda x, y: (normalize(x), y))
    history = model.fit(train, epochs=3, verbose=0, callbacks=callbacks("adapted"))
    return small.state(model), history.history


def fitted_twice(callbacks: Callbacks) -> Any:
    train = shuffled()
    results = []
    for name in ("first", "second"):
        model = small.model()
        given = {"validation_data": train.take(2), "epochs": 3, "verbose": 0}
        history = model.fit(train, **given, callbacks=callbacks(name))
        results.append((small.state(model), history.history))
    return results


@pytest.mark.parametrize("script", [adapted, fitted_twice])
def test_interrupted(script: Callable[[Callbacks], Any], tmp_path: Path) -> None:
    """Uninterrupted, it trains like plain Keras; also if interrupted and restarted."""

    def with_backup(folder: str, *stop: small.Stop) -> Callbacks:
        return lambda name: [
            *(stop if name != "first" else ()),
            kd.BackupAndRestore(
                tmp_path / folder / name, save_freq=1, on_busy="wait", delete_checkpoint=False
            ),
        ]

    plain = script(lambda name: [])
    assert script(with_backup("whole")) == plain
    for folder, place in {"in": (1, 2), "between": (2, 0)}.items():
        with pytest.raises(small.Interrupted):
            script(with_backup(folder, small.Stop(*place)))
        assert script(with_backup(folder)) == plain, folder


@pytest.mark.parametrize("first", ["keras_distplug", "tensorflow"])
def test_imported_in_any_order(first: str) -> None:
    """Iterators are counted, whichever package is imported first."""
    second = "tensorflow" if first == "keras_distplug" else "keras_distplug"
    code = f"""
import sys
finders = len(sys.meta_path)
import {first}
import {second}
import tensorflow as tf
from keras_distplug.backend.tensorflow.input import earlier_passes
data = tf.data.Dataset.range(3).shuffle(3).map(lambda x: x)
assert earlier_passes.count_iterators(data) == [(0, 0)]
list(data), next(iter(data.batch(2)))
assert earlier_passes.count_iterators(data) == [(2, 2)]
assert not any("earlier_passes" in type(each).__module__ for each in sys.meta_path)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_long_chains() -> None:
    """A script may iterate over a chain that is longer than Python's stack."""
    whole = tf.data.Dataset.range(2)
    for _ in range(1500):
        whole = whole.concatenate(tf.data.Dataset.range(2))
    assert earlier_passes.count_iterators(whole.shuffle(2)) == [(0, 0)]
    earlier_passes.add(whole, 1, 1)


def mirrored(
    data: Any,
    *callbacks: keras.callbacks.Callback,
    strategy: tf.distribute.Strategy | None = None,
    **given: Any,
) -> Any:
    """Trains on two replicas. Plain Keras inspects a batch first, for the shapes of variables."""
    strategy = strategy or tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        history = model.fit(data, epochs=3, **given, verbose=0, callbacks=list(callbacks))
    return small.state(model), history.history


def generated() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(3)
    while True:
        x = rng.normal(size=(8, 4)).astype("float32")
        yield x, x.sum(1, keepdims=True)


def test_orders_on_several_replicas(tmp_path: Path) -> None:
    """Inspecting a batch draws an order, with or without our callbacks."""
    resumes_exactly(shuffled, mirrored(shuffled()), tmp_path)


def test_orders_under_a_strategy_of_one_device(tmp_path: Path) -> None:
    """There, Keras also inspects a batch of every validation."""
    given = {"strategy": tf.distribute.OneDeviceStrategy("CPU:0")}
    expected = mirrored(shuffled(), validation_data=shuffled().take(2), **given)
    resumes_exactly(shuffled, expected, tmp_path, lambda: shuffled().take(2), **given)


def test_generators_on_several_replicas(tmp_path: Path) -> None:
    """Inspecting a batch loses none; plain Keras loses as many as were prefetched meanwhile."""
    x, y = zip(*islice(generated(), 9), strict=True)
    same = tf.data.Dataset.from_tensor_slices((np.stack(x), np.stack(y)))
    expected = mirrored(same, steps_per_epoch=3)
    resumes_exactly(generated, expected, tmp_path, steps_per_epoch=3)


def resumes_exactly(
    make: Callable[[], Any],
    expected: Any,
    tmp_path: Path,
    validation: Callable[[], Any] = lambda: None,
    **given: Any,
) -> None:
    def train(folder: str, *stop: small.Stop) -> Any:
        backup = kd.BackupAndRestore(
            tmp_path / folder, save_freq=1, on_busy="wait", delete_checkpoint=False
        )
        return mirrored(make(), *stop, backup, validation_data=validation(), **given)

    assert train("whole") == expected
    with pytest.raises(small.Interrupted):
        train("stopped", small.Stop(1, 1))
    assert train("stopped") == expected


def test_strings_on_several_replicas(tmp_path: Path) -> None:
    """Keras adds up the replicas' parts of a first batch, which is impossible for strings."""
    lookup = keras.layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")
    data = tf.data.Dataset.from_tensor_slices((["a", "b"] * 4, [0.0, 1.0] * 4)).batch(4)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        inputs = keras.Input((), dtype="string")
        model = keras.Model(inputs, keras.layers.Dense(1)(lookup(inputs)))
        model.compile("adam", "mse")
        history = model.fit(data, epochs=2, verbose=0, callbacks=kd.defaults(tmp_path))
    assert len(history.history["loss"]) == 2
