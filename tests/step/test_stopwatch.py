"""Times within a step, measured on every replica before it waits for the others."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from support import small  # noqa: E402
from tensorflow.python.framework import config  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.backend.tensorflow import trainer  # noqa: E402
from keras_distplug.step import recorded_times  # noqa: E402
from keras_distplug.step.step_windows import OwnWindows  # noqa: E402
from keras_distplug.step.stopwatch import Lap, listen  # noqa: E402

STRATEGIES = ("one", "mirrored", "central")
BATCHES = 6
SLOW_S = 0.05


class Sleeps(keras.layers.Layer):
    """Sleeps on one replica."""

    def __init__(self, replica: int) -> None:
        super().__init__()
        self.replica = replica

    def call(self, inputs):
        context = tf.distribute.get_replica_context()
        if context is None or isinstance(inputs, keras.KerasTensor):
            return inputs

        def wait(value: Any, replica: Any) -> Any:
            time.sleep(SLOW_S if replica == self.replica else 0)
            return value

        given = [inputs, context.replica_id_in_sync_group]
        later = tf.numpy_function(wait, given, tf.float32, stateful=False)
        later.set_shape(inputs.shape)
        return inputs + tf.stop_gradient(later - inputs)


class Watches(keras.callbacks.Callback):
    def set_model(self, model):
        super().set_model(model)
        trainer.adapt(model)
        self._measurements = listen(model)

    @property
    def laps(self):
        self._measurements.collect()
        return self._measurements.laps


def strategy_of(name: str) -> tf.distribute.Strategy:
    devices = ["CPU:0", "CPU:1"]
    if name == "mirrored":
        return tf.distribute.MirroredStrategy(devices)
    if name == "central":
        return tf.distribute.experimental.CentralStorageStrategy(devices, "CPU:0")
    return tf.distribute.get_strategy()


def model(
    strategy: str = "one", *layers: keras.layers.Layer, kind: type = keras.Model, **compiled: Any
) -> keras.Model:
    with strategy_of(strategy).scope():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        outputs = inputs
        for layer in (*layers, keras.layers.Dense(6, activation="relu"), keras.layers.Dense(1)):
            outputs = layer(outputs)
        made = kind(inputs, outputs)
        make = compiled.pop("optimizer", lambda: keras.optimizers.Adam(0.01))
        metrics = ["mae"] if kind is keras.Model else None  # a custom step updates none
        made.compile(make(), "mse", metrics=metrics, **compiled)
    return trainer.adapt(made)


def data() -> tf.data.Dataset:
    x = np.random.default_rng(0).normal(size=(BATCHES * 8, 4)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1] * 2)).batch(8)


def laps_of(made: keras.Model, *callbacks: keras.callbacks.Callback) -> list[Lap]:
    watches = Watches()
    made.fit(data(), verbose=0, callbacks=[watches, *callbacks])
    return list(watches.laps)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_laps(strategy: str) -> None:
    """Every replica reports every step, with times of this process's clock."""
    made = model(strategy)
    start_s = time.perf_counter()
    laps = laps_of(made)
    ended_s = time.perf_counter()
    replicas = made.distribute_strategy.num_replicas_in_sync
    assert sorted(each.replica for each in laps) == sorted(list(range(replicas)) * BATCHES)
    for each in laps:
        assert start_s < each.start_s < ended_s
        assert each.compute_s > 0
        assert each.start_s + each.compute_s < ended_s


@pytest.mark.parametrize("strategy", ["mirrored", "central"])
def test_slow_replica(strategy: str) -> None:
    """A replica's slowness counts in its own time, not in that of the others."""
    laps = laps_of(model(strategy, Sleeps(1)))
    slow, other = ([each for each in laps if each.replica == replica] for replica in (1, 0))
    assert min(each.compute_s for each in slow) >= SLOW_S
    assert np.median([each.compute_s for each in other]) < SLOW_S


class Own(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class InAFunction(Own):
    def train_step(self, data):
        if not hasattr(self, "whole"):
            self.whole = tf.function(super().train_step)
        return self.whole(data)


@pytest.mark.parametrize("strategy", ["one", "mirrored"])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"steps_per_execution": 3},
        {"run_eagerly": True},
        {"optimizer": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)},
        {"optimizer": lambda: keras.optimizers.Adam(0.01, clipnorm=0.1, use_ema=True)},
        {"optimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))},
        {"kind": Own},
    ],
    ids=["plain", "executions", "eager", "accumulation", "clipping", "loss scale", "own step"],
)
def test_same_bits(strategy: str, arguments: dict[str, Any]) -> None:
    """Results are bit-identical with and without NaNWatchdog's gate, and every step is reported."""
    bare, watched, both = (model(strategy, **arguments) for _ in range(3))
    expected = bare.fit(data(), verbose=0).history
    for each, others in ((watched, []), (both, [kd.NaNWatchdog()])):
        watches = Watches()
        history = each.fit(data(), verbose=0, callbacks=[watches, *others]).history
        assert history == expected
        assert small.state(each) == small.state(bare)
        assert len(watches.laps) == BATCHES * bare.distribute_strategy.num_replicas_in_sync


def test_step_in_a_function() -> None:
    """A step inside the user's own `tf.function` cannot be measured, but is not harmed."""
    bare, watched = model(kind=InAFunction), model(kind=InAFunction)
    bare.fit(data(), verbose=0)
    laps_of(watched)
    assert small.state(watched) == small.state(bare)


def test_removed_after_fit() -> None:
    """The next `fit` without it is not measured, and NaN is only prevented if requested."""
    made = model()
    watches = Watches()
    made.fit(data(), verbose=0, callbacks=[watches])
    assert len(watches.laps) == BATCHES
    made.fit(data(), verbose=0, callbacks=[kd.NaNWatchdog()])
    made.fit(data(), verbose=0)
    assert len(watches.laps) == BATCHES
    x = np.full((8, 4), np.nan, "float32")
    made.fit(x, x[:, :1], verbose=0, callbacks=[Watches()])
    assert not np.isfinite(made.get_weights()[0]).any()


def test_several_listeners() -> None:
    made, one, other = model(), Watches(), Watches()
    made.fit(data(), verbose=0, callbacks=[one, other])
    assert list(one.laps) == list(other.laps)
    assert len(one.laps) == BATCHES


def test_no_python_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a single replica per process, times are recorded without calling Python."""

    def refuse(*given: Any, **named: Any) -> None:
        raise AssertionError("tf.numpy_function")

    monkeypatch.setattr(tf, "numpy_function", refuse)
    assert len(laps_of(model())) == BATCHES
    with pytest.raises(AssertionError, match=r"tf\.numpy_function"):
        laps_of(model("mirrored"))


def test_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Op determinism forbids TensorFlow's clock, even in a second `fit` of a traced model."""
    made = model()
    assert len(laps_of(made)) == BATCHES
    tf.config.experimental.enable_op_determinism()
    try:
        assert len(laps_of(made)) == BATCHES
    finally:
        config.disable_op_determinism()


def test_check_numerics() -> None:
    """Times are never NaN, which a user's checks would report."""
    tf.debugging.enable_check_numerics()
    try:
        assert len(laps_of(model())) == BATCHES
    finally:
        tf.debugging.disable_check_numerics()


def test_system_clock_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that were recorded before the clock was set are discarded."""
    watches = Watches()
    model().fit(data(), verbose=0, callbacks=[watches])
    set_back_s = recorded_times._offset_s() + 5
    monkeypatch.setattr(recorded_times, "_offset_s", lambda: set_back_s)
    assert list(watches.laps) == []


class Windows(keras.callbacks.Callback):
    """Measures a window of all steps, after one of which a callback runs an additional step."""

    def set_model(self, model):
        super().set_model(model)
        self.windows = OwnWindows(trainer.adapt(model))

    def on_train_begin(self, logs=None):
        self.windows.begin()

    def on_train_batch_begin(self, batch, logs=None):
        self.windows.begin_step()

    def on_train_batch_end(self, batch, logs=None):
        self.windows.end_step()
        if batch == 2:
            self.model.train_on_batch(np.ones((8, 4), "float32"), np.ones((8, 1), "float32"))

    def on_train_end(self, logs=None):
        self.report = self.windows.end_window()


def test_additional_step_in_a_callback() -> None:
    """Waits are assigned to the right steps even if a callback runs an additional step."""
    made, windows = model("one", Sleeps(0)), Windows()
    made.fit(data(), verbose=0, callbacks=[windows])
    assert windows.report.input_total_s is not None
    assert windows.report.input_total_s < SLOW_S
    assert windows.report.replicas[0].compute_s >= SLOW_S


def test_fit_within_a_scope() -> None:
    """Within a strategy's scope, the variables with the times are not the strategy's."""
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        made = model()
        assert len(laps_of(made)) == BATCHES
        assert len(laps_of(made)) == BATCHES


def test_compiled_by_xla() -> None:
    """A step compiled by XLA is not measured."""
    assert laps_of(model(jit_compile=True)) == []
