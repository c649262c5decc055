"""Python attributes of models, layers, metrics, losses and optimizers are state if they change."""

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

_seen: list[int] = []


class CountingLayer(keras.layers.Layer):
    """Computes with a count, using NumPy, which only an eager step can."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.sums = 0, np.zeros(2)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.calls += 1
            self.sums[self.calls % 2] += float(x.numpy().sum())
        return x * (1 + self.calls % 3 + 0.01 * self.sums[0])


class Median(keras.metrics.Metric):
    """Keeps all errors of an epoch."""

    def __init__(self) -> None:
        super().__init__(name="median")
        self.errors: list[float] = []

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.errors.extend(np.abs(np.asarray(y) - np.asarray(p)).ravel().tolist())

    def result(self) -> float:
        return float(np.median(self.errors)) if self.errors else 0.0

    def reset_state(self) -> None:
        self.errors = []


class Slow(keras.optimizers.SGD):
    """Returns to an average at every third step."""

    steps = 0
    slow: Any = None

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        super().apply(grads, trainable_variables)
        variables = self._trainable_variables
        if self.slow is None:
            self.slow = [each.numpy() for each in variables]
        self.steps += 1
        if self.steps % 3 == 0:
            self.slow = [(a + b.numpy()) / 2 for a, b in zip(self.slow, variables, strict=True)]
            for variable, value in zip(variables, self.slow, strict=True):
                variable.assign(value)


def eager() -> Any:
    model = keras.Sequential([keras.Input((4,)), CountingLayer(), keras.layers.Dense(1)])
    model.compile(Slow(0.01), "mse", metrics=[Median(), "mae"], run_eagerly=True)
    return model


def eager_globals() -> Any:
    """A loss that keeps its state in a global."""
    _seen.clear()

    def loss(y: Any, p: Any) -> Any:
        _seen.append(len(_seen))
        return tf.reduce_mean((y - p) ** 2, -1) * (1 + len(_seen) % 4)

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", loss, run_eagerly=True)
    return model


class Buffer:
    def __init__(self) -> None:
        self.rows, self.count = np.zeros((16, 4), "float32"), 0
        self.random = np.random.default_rng(3)

    def put_and_draw(self, rows: np.ndarray) -> np.ndarray:
        for row in rows:
            self.rows[self.count % 16] = row
            self.count += 1
        return self.rows[self.random.integers(0, min(self.count, 16), len(rows))]


class Replaying(keras.Model):
    """Its step calls Python code, which keeps earlier samples."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.buffer = keras.layers.Dense(1), Buffer()

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        replayed = tf.numpy_function(self.buffer.put_and_draw, [x], tf.float32)
        return super().train_step((x + 0.1 * tf.ensure_shape(replayed, x.shape), y))


def replaying() -> Any:
    model = Replaying()
    model.compile("adam", "mse")
    return model


class Slowing(keras.Model):
    """Counts steps outside the step function."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.steps = keras.layers.Dense(1), 0

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def make_train_function(self, force: bool = False) -> Any:
        super().make_train_function(force)
        step = self.train_function

        def counting(iterator: Any) -> Any:
            self.steps += 1
            self.optimizer.learning_rate = 0.1 / self.steps
            return step(iterator)

        self.train_function = counting
        return counting


def slowing() -> Any:
    model = Slowing()
    model.compile("sgd", "mse")
    return model


class Block(keras.layers.Layer):
    def build(self, shape: Any) -> None:
        self.parts = [keras.layers.Dense(shape[-1]) for _ in range(2)]
        for each in self.parts:
            each.build(shape)

    def call(self, x: Any) -> Any:
        for each in self.parts:
            x = keras.ops.tanh(each(x))
        return x


class Lazy(keras.Model):
    """Creates its layers when it is built, and these create theirs."""

    def build(self, shape: Any) -> None:
        self.blocks, self.head = [Block(), Block()], keras.layers.Dense(1)
        self.scale = self.add_weight(shape=(shape[-1],), initializer="random_normal", name="scale")
        super().build(shape)

    def call(self, x: Any) -> Any:
        x = x * self.scale
        for each in self.blocks:
            x = each(x)
        return self.head(x)


def lazy() -> Any:
    model = Lazy()
    model.compile("adam", "mse")
    return model


class Cotraining(keras.callbacks.Callback):
    """Trains its own inner model, whose predictions set the learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        self.critic.compile("adam", "mse")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        loss = self.critic.train_on_batch(small.X[:8], small.Y[:8])
        self.model.optimizer.learning_rate = 0.01 / (1 + float(loss))


KINDS: dict[str, tuple[Callable[[], Any], list[type[keras.callbacks.Callback]]]] = {
    "eager": (eager, []),
    "eager globals": (eager_globals, []),
    "numpy_function": (replaying, []),
    "outside the step": (slowing, []),
    "made when built": (lazy, []),
    "model of a callback": (small.model, [Cotraining]),
}


def fit(name: str, *callbacks: keras.callbacks.Callback) -> Any:
    keras.utils.set_random_seed(5)
    make, kinds = KINDS[name]
    model = make()
    given = [*(kind() for kind in kinds), *callbacks]
    history = model.fit(
        small.X, small.Y, batch_size=8, epochs=3, verbose=0, shuffle=False, callbacks=given
    )
    return [each.tobytes() for each in model.get_weights()], history.history


def backup(directory: Path) -> kd.BackupAndRestore:
    return kd.BackupAndRestore(directory, save_freq=1, on_busy="wait", delete_checkpoint=False)


@pytest.mark.parametrize("name", KINDS)
def test_interrupted(name: str, tmp_path: Path) -> None:
    """Training ends with the weights and the History of plain Keras, from within an epoch and after
    its last batch."""
    plain = fit(name)
    for place in [(1, 1), (1, 3)]:
        directory = tmp_path / str(place)
        with pytest.raises(small.Interrupted):
            fit(name, backup(directory), small.Stop(*place))
        assert fit(name, backup(directory)) == plain, place


class Adding(keras.callbacks.Callback):
    """Adds weights to a layer, as LoRA does."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.model.layers[0].enable_lora(2)
            self.model.compile("adam", "mse")
            self.model.make_train_function()


def test_added_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training such a model reports immediately that a restart cannot resume from there."""
    small.model().fit(small.X, small.Y, epochs=2, verbose=0, callbacks=[backup(tmp_path), Adding()])
    [line] = {each for each in caplog.messages if "were added to the model" in each}
    assert "lora_kernel" in line
