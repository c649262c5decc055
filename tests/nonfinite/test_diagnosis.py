"""Recomputing a batch names the first non-finite value and does not change the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from support import small  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.nonfinite.diagnosis import diagnose  # noqa: E402

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 4)).astype("float32")
Y = X[:, :1] * 2
DEVICES = ["CPU:0", "CPU:1"]


class Root(keras.layers.Layer):
    """Finite, but with a non-finite gradient: that of a square root at 0."""

    def call(self, inputs):
        return inputs + keras.ops.sqrt(keras.ops.relu(-keras.ops.abs(inputs)))


class Grows(keras.layers.Layer):
    """Adds a loss that overflows with `x`, and has state."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, inputs):
        self.calls.assign_add(1.0)
        self.add_loss(keras.ops.exp(keras.ops.max(inputs)))
        return inputs


def model(*layers: keras.layers.Layer, **compiled: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    made = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(6, activation="relu", name="first"),
            keras.layers.BatchNormalization(name="norm"),
            *layers,
            keras.layers.Dropout(0.2),
            keras.layers.Dense(1, name="last"),
        ],
        name="m",
    )
    made.compile(
        **{
            "optimizer": keras.optimizers.Adam(0.01),
            "loss": "mse",
            "metrics": ["mae", keras.metrics.RootMeanSquaredError()],
            **compiled,
        }
    )
    return made


def changed(array: np.ndarray, place: Any, value: float) -> np.ndarray:
    array = array.copy()
    array[place] = value
    return array


def all_state(made: keras.Model) -> list[bytes]:
    return [*small.state(made), *(v.numpy().tobytes() for v in made.metrics_variables)]


@pytest.mark.parametrize(
    ("batch", "origin"),
    [
        ((X, Y), None),
        (
            (changed(X, (3, 1), math.nan), Y),
            "the batch (1 of 32 values in `x` are not finite, first in sample 4 of 8)",
        ),
        (
            (X, changed(Y, 2, -math.inf)),
            "the batch (1 of 8 values in `y` are not finite, first in sample 3 of 8)",
        ),
        (
            (X, Y, changed(np.ones(8, "float32"), 0, math.nan)),
            "the batch (1 of 8 values in `sample_weight` are not finite, first in sample 1 of 8)",
        ),
        ((X, Y * 1e37), "the loss, although the outputs are finite"),
    ],
    ids=["sound", "x", "y", "sample_weight", "loss"],
)
def test_origin(batch: Any, origin: str | None) -> None:
    made = model()
    made.fit(X, Y, batch_size=8, verbose=0)
    before = all_state(made)
    found = diagnose(made, batch)
    assert found.origin == origin
    assert found.is_finite == (origin is None)
    assert found.is_finite == (math.isfinite(found.loss) and not found.variables)
    assert all_state(made) == before


def test_variable() -> None:
    """A non-finite variable is reported before values that are computed with it."""
    made = model()
    kernel = made.get_layer("last").kernel
    kernel.assign(changed(np.asarray(kernel.value), (0, 0), math.nan))
    assert diagnose(made, (X, Y)).origin == "the variable `m/last/kernel`"


def test_gradient_only() -> None:
    made = model(Root(name="root"))
    found = diagnose(made, (X, Y))
    assert math.isfinite(found.loss)
    assert found.origin == "the gradient of `m/first/kernel`, although the loss is finite"
    assert found.variables == ("m/first/kernel", "m/first/bias", "m/norm/gamma", "m/norm/beta")


def test_added_loss() -> None:
    """A loss that a layer adds counts once; neither the loss nor the layer's state remains."""
    made = model(Grows())
    made.fit(X, Y, batch_size=8, verbose=0)
    before = all_state(made)
    assert diagnose(made, (X, Y)).is_finite
    batch = (X, Y)
    made.get_layer("norm").gamma.assign([1e3] * 6)
    found = diagnose(made, batch)
    assert found.origin == "the loss, although the outputs are finite"
    made.get_layer("norm").gamma.assign(np.frombuffer(before[2], "float32"))
    assert all_state(made) == before


def test_between_layers() -> None:
    """A non-finite value between layers is found at the layer that receives it."""
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(3, name="first")(inputs)
    outputs = keras.layers.Dense(1, name="last")(keras.ops.log(hidden - 1e6))
    made = keras.Model(inputs, outputs)
    made.compile("sgd", "mse")
    assert diagnose(made, (X, Y)).origin in (
        "the input of layer `last` (Dense), although the outputs of earlier layers are finite",
        # Newer releases of Keras treat operations as layers.
        "the output of layer `log` (Log), although its inputs are finite",
    )


def test_nested() -> None:
    """The innermost layer is named."""
    inner = keras.Sequential([keras.layers.Rescaling(1e38, name="large"), keras.layers.Dense(2)])
    made = model(inner)
    made.get_layer("norm").gamma.assign([1e3] * 6)
    origin = diagnose(made, (X, Y)).origin
    assert origin == "the output of layer `large` (Rescaling), although its inputs are finite"


def test_dictionaries() -> None:
    inputs = {name: keras.Input((4,), name=name) for name in ("a", "b")}
    outputs = keras.layers.Dense(1)(keras.layers.Concatenate()(list(inputs.values())))
    made = keras.Model(inputs, outputs)
    made.compile("sgd", "mse")
    batch = ({"a": X, "b": changed(X, 5, math.inf)}, Y)
    assert diagnose(made, batch).origin == (
        "the batch (4 of 32 values in `x/b` are not finite, first in sample 6 of 8)"
    )


class Own(keras.Model):
    """A custom step, with a function in it and an optimizer that is called explicitly."""

    def __init__(self) -> None:
        super().__init__(name="own")
        self.dense = keras.layers.Dense(1, name="dense")

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, y = data

        @tf.function
        def loss_of():
            return self.compute_loss(y=y, y_pred=self(x, training=True))

        with tf.GradientTape() as tape:
            loss = loss_of()
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def test_custom_step() -> None:
    made = Own()
    made.compile("adam", "mse")
    made.fit(X, Y, verbose=0)
    before = all_state(made)
    assert diagnose(made, (X, Y)).is_finite
    assert diagnose(made, (X, Y * 1e37)).origin == "the loss, although the outputs are finite"
    found = diagnose(made, (X, changed(Y, 0, math.nan)))
    assert found.origin.startswith("the batch (1 of 8 values in `y`")
    assert found.variables == ("own/dense/kernel", "own/dense/bias")
    assert all_state(made) == before
    assert not tf.config.functions_run_eagerly()


def test_loss_scale() -> None:
    """Gradients that overflow because of their scale are not a fault of the batch."""
    made = model(
        optimizer=keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(), initial_scale=2.0**127
        ),
        loss="mae",
    )
    assert diagnose(made, (X, Y)).is_finite
    assert not diagnose(made, (X, changed(Y, 0, math.nan))).is_finite


def test_error_in_a_step() -> None:
    """The model is unchanged after any error."""
    made = model()
    made.fit(X, Y, batch_size=8, verbose=0)
    before, calls = all_state(made), [vars(layer).get("call") for layer in made.layers]
    with pytest.raises(ValueError, match="compatible"):
        diagnose(made, (X[:, :3], Y))
    assert all_state(made) == before
    assert [vars(layer).get("call") for layer in made.layers] == calls
    assert not tf.config.functions_run_eagerly()


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: tf.distribute.MirroredStrategy(DEVICES),
        lambda: tf.distribute.experimental.CentralStorageStrategy(DEVICES, "CPU:0"),
    ],
    ids=["mirrored", "central"],
)
def test_several_replicas(strategy: Callable[[], tf.distribute.Strategy]) -> None:
    """A diagnosis does not involve the other replicas, and leaves nothing in their variables."""
    with strategy().scope():
        made = model(Grows())
    kd.adapt(made)
    made.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8), verbose=0)
    before = all_state(made)
    assert diagnose(made, (X, Y)).is_finite
    assert diagnose(made, (changed(X, 0, math.nan), Y)).origin.startswith("the batch (4 of 32")
    assert all_state(made) == before
