"""Updates that are not finite are not applied."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_distplug.backend.tensorflow import trainer
from keras_distplug.backend.tensorflow.replicas import ahead
from keras_distplug.nonfinite.gate import Fault, NaNGate
from keras_distplug.step.instrumentation import StepInstrumentation

pytestmark = [pytest.mark.tf, pytest.mark.timeout(240)]

BATCH, BATCHES, BAD = 8, 6, 3

Optimizer = Callable[[], keras.optimizers.Optimizer]


class Guarded(keras.callbacks.Callback):
    """Adds a gate to the step, and records its faults with the batches after which they
    occurred."""

    def __init__(self, max_score: float | None = None) -> None:
        super().__init__()
        self.max_score = max_score
        self.faults: list[tuple[int, Fault]] = []

    def set_model(self, model):
        super().set_model(model)
        trainer.adapt(model)
        self.gate = StepInstrumentation.of(model).use_shared(NaNGate)
        self.gate.set_up(self.max_score)

    def on_train_batch_end(self, batch, logs=None):
        self.faults += [(batch, fault) for fault in self.gate.faults()]


def strategy_of(name: str) -> tf.distribute.Strategy:
    devices = ["CPU:0", "CPU:1"]
    if name == "mirrored":
        return tf.distribute.MirroredStrategy(devices)
    if name == "central":
        return tf.distribute.experimental.CentralStorageStrategy(devices, "CPU:0")
    return tf.distribute.get_strategy()


def model_under(
    strategy: str = "one",
    optimizer: Optimizer = lambda: keras.optimizers.Adam(0.01),
    layers: tuple[keras.Layer, ...] = (),
    loss: str = "mse",
    **compiled: Any,
) -> keras.Model:
    with strategy_of(strategy).scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Dense(7, activation="tanh"),
                keras.layers.BatchNormalization(),
                *layers,
                keras.layers.Dense(1),
            ]
        )
        model.compile(optimizer(), loss, metrics=["mae"], **compiled)
    return trainer.adapt(model)


def data(
    spoil: Callable[[np.ndarray, np.ndarray], None] = lambda x, y: None, absent: bool = False
) -> tf.data.Dataset:
    """Yields batches, one of which may be spoiled or missing."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCHES, BATCH, 5)).astype("float32")
    y = x[..., :1] * 3
    spoil(x[BAD], y[BAD])
    if absent:
        x, y = (np.delete(each, BAD, axis=0) for each in (x, y))
    x, y = (each.reshape(-1, each.shape[-1]) for each in (x, y))
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


def nan_in_x(x: np.ndarray, y: np.ndarray) -> None:
    x[1, 2] = np.nan


def bits(model: keras.Model) -> list[bytes]:
    variables = [*model.variables, *model.optimizer.variables]
    return [np.asarray(v.value).tobytes() for v in variables if v.synchronization != "on_read"]


def trained(model: keras.Model, x: tf.data.Dataset, *callbacks: Any) -> tuple[list[bytes], Any]:
    history = model.fit(x, epochs=2, verbose=0, callbacks=list(callbacks)).history
    return bits(model), history


OPTIMIZERS: dict[str, Optimizer] = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "accumulating": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "clipping": lambda: keras.optimizers.SGD(
        0.01, momentum=0.9, global_clipnorm=1.0, use_ema=True, ema_overwrite_frequency=3
    ),
    "scaling": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01)),
}
CASES = [
    *[("one", name, {}) for name in OPTIMIZERS],
    ("one", "adam", {"run_eagerly": True}),
    ("one", "adam", {"steps_per_execution": 2}),
    *[("mirrored", name, {}) for name in OPTIMIZERS],
    ("mirrored", "adam", {"steps_per_execution": 2}),
    ("central", "adam", {}),
    ("central", "accumulating", {}),
]


@pytest.mark.parametrize(("strategy", "optimizer", "compiled"), CASES)
def test_skipped(strategy: str, optimizer: str, compiled: dict[str, Any]) -> None:
    """Without a fault, not a single bit changes. With one, the result is that of a training without
    the batch: weights, statistics of BatchNormalization, the optimizer's state, metrics."""

    def model() -> keras.Model:
        return model_under(strategy, OPTIMIZERS[optimizer], **compiled)

    well = Guarded()
    assert trained(model(), data(), well) == trained(model(), data())
    assert well.faults == []

    guarded = Guarded()
    assert trained(model(), data(nan_in_x), guarded) == trained(model(), data(absent=True))
    replicas = 1 if strategy == "one" else 2
    assert [fault.replica for _, fault in guarded.faults] == 2 * list(range(replicas))
    assert [fault.is_finite for _, fault in guarded.faults] == 2 * [False, True][:replicas]
    first = guarded.faults[0][1]
    assert first.batch[0].shape == (BATCH // replicas, 5)
    assert np.isnan(first.batch[0][1, 2])


def watch_updates(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Returns a list that receives, per traced update, if it is computed ahead, and if it is
    applied in any case and reverted at the end of the step."""
    seen = []

    def apply_if(*given: Any) -> bool:
        is_ahead = stock(*given)
        seen.append((is_ahead, is_ahead and given[-1] is not None))
        return is_ahead

    stock = ahead.apply_if
    monkeypatch.setattr(ahead, "apply_if", apply_if)
    return seen


@pytest.mark.parametrize("is_reverted", [True, False])
@pytest.mark.parametrize("compiled", [{}, {"steps_per_execution": 2}, {"jit_compile": True}])
def test_computed_ahead(
    compiled: dict[str, Any], is_reverted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same if updates are computed before it is known if they are applied, with a condition
    around the assignments, or without."""
    if not is_reverted:
        monkeypatch.setattr(StepInstrumentation, "reverts", lambda self: False)
    monkeypatch.setattr(ahead, "_WORTH_BYTES", 0)
    seen = watch_updates(monkeypatch)
    guarded, well = Guarded(), Guarded()
    absent = trained(model_under(**compiled), data(absent=True), well)
    assert trained(model_under(**compiled), data(nan_in_x), guarded) == absent
    assert len(guarded.faults) == 2
    assert set(seen) == {(True, is_reverted and "jit_compile" not in compiled)}
    if "jit_compile" not in compiled:
        assert absent == trained(model_under(**compiled), data(absent=True))


def test_layer_that_changes_its_weights() -> None:
    """A weight that its layer changes in the forward pass, before the update does, gets the value
    of the previous step back."""

    def model() -> keras.Model:
        keras.utils.set_random_seed(2)
        return model_under(layers=(keras.layers.SpectralNormalization(keras.layers.Dense(6)),))

    guarded = Guarded()
    assert trained(model(), data(nan_in_x), guarded) == trained(model(), data(absent=True))
    assert len(guarded.faults) == 2


@pytest.mark.parametrize("name", ["train_step", "compute_metrics"])
@pytest.mark.parametrize("is_of_class", [True, False])
def test_weights_used_within_a_step(
    name: str, is_of_class: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that uses the weights after the update, in variables that Keras does not know, sees no
    weights that are not finite."""
    sums = tf.Variable(tf.zeros([7, 1]))
    stock = getattr(keras.Sequential, name)

    def method(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        found = stock(self, *args, **kwargs)
        sums.assign_add(self.layers[-1].kernel.value)
        return found

    if is_of_class:
        monkeypatch.setattr(keras, "Sequential", type("Sums", (keras.Sequential,), {name: method}))
    model = model_under()
    if not is_of_class:
        setattr(model, name, types.MethodType(method, model))
    seen, guarded = watch_updates(monkeypatch), Guarded()
    model.fit(data(nan_in_x), verbose=0, callbacks=[guarded])
    assert len(guarded.faults) == 1
    assert np.isfinite(sums.numpy()).all()
    assert sums.numpy().any()
    assert set(seen) == {(False, False)}


def test_compiled_by_xla() -> None:
    """A fault in a step compiled by XLA is reported and skipped, too. (Its last bits differ from
    those without a gate.)"""
    model, guarded = model_under(jit_compile=True), Guarded()
    found = trained(model, data(nan_in_x), guarded)
    assert model.jit_compile
    assert [(batch, fault.replica) for batch, fault in guarded.faults] == [(BAD, 0)] * 2
    assert guarded.faults[0][1].variables[0] == model.layers[0].kernel.path
    assert found == trained(model_under(jit_compile=True), data(absent=True), Guarded())


class SpoilsGradients(keras.layers.Layer):
    """Finite, but with a non-finite gradient for large inputs."""

    def call(self, x):
        @tf.custom_gradient
        def spoiled(x):
            def grad(upstream):
                return tf.where(tf.reduce_any(tf.abs(x) > 1e6), math.nan, upstream)

            return tf.identity(x), grad

        return spoiled(x)


def large_x(x: np.ndarray, y: np.ndarray) -> None:
    x[1] = 1e9


def nan_in_y(x: np.ndarray, y: np.ndarray) -> None:
    y[1] = np.nan


def inf_in_y(x: np.ndarray, y: np.ndarray) -> None:
    y[1] = np.inf


@pytest.mark.parametrize("strategy", ["one", "mirrored"])
@pytest.mark.parametrize("spoil", [nan_in_y, inf_in_y])
def test_labels(strategy: str, spoil: Any) -> None:
    """A label that is not finite makes the loss non-finite, which is reported."""
    guarded = Guarded()
    found = trained(model_under(strategy), data(spoil), guarded)
    assert found == trained(model_under(strategy), data(absent=True))
    assert not math.isfinite(guarded.faults[0][1].loss)


@pytest.mark.parametrize("strategy", ["one", "mirrored"])
def test_gradient_only(strategy: str) -> None:
    """If the loss is finite and a gradient is not, exactly the variables below it are named."""
    guarded = Guarded()
    model = large_model(strategy)
    trained(model, data(large_x), guarded)
    assert len(guarded.faults) == (2 if strategy == "one" else 4)
    fault = guarded.faults[0][1]
    assert math.isfinite(fault.loss)
    assert {path.split("/")[-2] for path in fault.variables} == {"below"}
    assert all(np.isfinite(each).all() for each in model.get_weights())


def large_model(strategy: str) -> keras.Model:
    with strategy_of(strategy).scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Dense(3, name="below"),
                SpoilsGradients(),
                keras.layers.Dense(1, name="above"),
            ]
        )
        model.compile(keras.optimizers.SGD(1e-30), "mae")
    return trainer.adapt(model)


def test_loss_only() -> None:
    """A loss that is not finite is skipped on all replicas, even if all gradients are finite."""

    class Overflows(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return tf.abs(y_pred[:, 0]) + tf.stop_gradient(tf.where(y_true[:, 0] > 90, math.inf, 0))

    def large_y(x: np.ndarray, y: np.ndarray) -> None:
        y[1] = 100

    for strategy in ("one", "mirrored"):

        def model(strategy: str = strategy) -> keras.Model:
            made = model_under(strategy)
            with made.distribute_strategy.scope():
                made.compile(keras.optimizers.Adam(0.01), Overflows())
            return trainer.adapt(made)

        guarded = Guarded()
        found = trained(model(), data(large_y), guarded)
        assert found == trained(model(), data(absent=True))
        assert guarded.faults[0][1].variables == ()
        assert guarded.faults[0][1].loss == math.inf


def test_data_that_may_be_nan() -> None:
    """NaN in the data is not a fault if loss and gradients are finite."""

    class Masked(keras.losses.Loss):
        def call(self, y_true, y_pred):
            known = tf.math.is_finite(y_true)
            return tf.where(known, tf.square(y_pred - tf.where(known, y_true, 0.0)), 0.0)

    for optimizer in ("adam", "scaling"):
        made = []
        for callbacks in ([Guarded()], []):
            model = model_under("one", OPTIMIZERS[optimizer])
            model.compile(OPTIMIZERS[optimizer](), Masked())
            found, history = trained(model, data(nan_in_y), *callbacks)
            made.append((found, history["loss"]))
            assert all(callback.faults == [] for callback in callbacks)
        assert made[0] == made[1]


def test_ragged_data() -> None:
    """Batches that do not consist of plain tensors are not recorded; everything else works."""
    keras.utils.set_random_seed(1)

    class Sums(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = keras.layers.Dense(1)

        def call(self, x):
            return self.layer(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                sums = tf.reduce_sum(x, axis=1)[:, None]
                loss = tf.reduce_mean(tf.square(self(sums) - y))
            weights = self.trainable_weights
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    rows = tf.ragged.constant([[1.0], [2.0, math.nan], [3.0, 1.0], [4.0]])
    x = tf.data.Dataset.from_tensor_slices((rows, tf.ones([4, 1]))).batch(2)
    model, guarded = Sums(), Guarded()
    model.compile("sgd")
    model.fit(x, verbose=0, callbacks=[guarded])
    assert [(batch, fault.batch) for batch, fault in guarded.faults] == [(0, None)]
    assert all(np.isfinite(each).all() for each in model.get_weights())


class TwoOptimizers(keras.Model):
    """A custom step without `compute_loss`, with separate optimizers for two layers, one of which
    is not built before."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = keras.layers.Dense(1), keras.layers.Dense(1)
        self.second = keras.optimizers.SGD(0.01)

    def call(self, x):
        return self.one(x) + self.other(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(keras.losses.mean_squared_error(y, self(x)))
        for layer, optimizer in ((self.one, self.optimizer), (self.other, self.second)):
            weights = layer.trainable_weights
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def test_own_step() -> None:
    """A custom `train_step` with several optimizers."""

    def model() -> keras.Model:
        keras.utils.set_random_seed(1)
        made = TwoOptimizers()
        made.compile(keras.optimizers.SGD(0.01))
        return made

    guarded = Guarded()
    made, plain = model(), model()
    made.fit(data(nan_in_x), verbose=0, callbacks=[guarded])
    plain.fit(data(absent=True), verbose=0)
    assert [w.tobytes() for w in made.get_weights()] == [w.tobytes() for w in plain.get_weights()]
    assert len(guarded.faults) == 2
    assert {fault.optimizer for _, fault in guarded.faults} == {"optimizer", "second"}
    assert guarded.gate.sees_updates


@pytest.mark.parametrize("traced", ["step", "update"])
def test_functions_in_a_step(traced: str) -> None:
    """A step, or a part of it, that is a separate `tf.function` has the gate, too."""

    class Traced(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = keras.layers.Dense(1)
            self.seen = keras.metrics.Mean()

        def call(self, x):
            return self.layer(x)

        def update(self, gradients):
            self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x))
            self.seen.update_state(loss)
            self.update(tape.gradient(loss, self.trainable_weights))
            return {"seen": self.seen.result()}

    def model() -> keras.Model:
        keras.utils.set_random_seed(1)
        made = Traced()
        name = {"step": "train_step", "update": "update"}[traced]
        object.__setattr__(made, name, tf.function(getattr(made, name)))
        made.compile(keras.optimizers.SGD(0.01), "mse")
        return made

    guarded = Guarded()
    made, plain = model(), model()
    made.fit(data(nan_in_x), verbose=0, callbacks=[guarded])
    plain.fit(data(absent=True), verbose=0)
    assert [w.tobytes() for w in made.get_weights()] == [w.tobytes() for w in plain.get_weights()]
    assert [fault.is_finite for _, fault in guarded.faults] == [False]


def test_step_without_optimizers() -> None:
    """A step that bypasses all optimizers is recognized."""

    class Past(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = keras.layers.Dense(1)

        def call(self, x):
            return self.layer(x)

        def train_step(self, data):
            self(data[0])
            return {"loss": tf.constant(0.0)}

    model, guarded = Past(), Guarded()
    model.compile("sgd")
    model.fit(data(), verbose=0, callbacks=[guarded])
    assert not guarded.gate.sees_updates


def test_for_one_fit() -> None:
    """A `fit` without a callback that uses the gate has no gate, even after one that had it; a
    second one that uses it does not retrace."""
    model = model_under()
    model.fit(data(), verbose=0, callbacks=[Guarded()])
    traced = model.train_function
    model.fit(data(), verbose=0, callbacks=[Guarded()])
    assert model.train_function is traced
    model.fit(data(nan_in_x), verbose=0)
    assert np.isnan(model.get_weights()[0]).all()


@pytest.mark.parametrize("is_guarded", [True, False])
def test_step_given_between_fits(is_guarded: bool) -> None:
    """A step that the script assigns to the model after a `fit` with the gate is the one that is
    trained."""
    model = model_under()
    model.fit(data(), verbose=0, callbacks=[Guarded()])
    stock = type(model).train_step

    def train_step(self: keras.Model, given: Any) -> dict[str, Any]:
        return {**stock(self, given), "own": tf.constant(3.0)}

    model.train_step = types.MethodType(train_step, model)
    model.make_train_function(force=True)  # otherwise Keras keeps the old one
    guarded = Guarded()
    logs = model.fit(data(nan_in_x), verbose=0, callbacks=[guarded] if is_guarded else [])
    assert logs.history["own"] == [3.0]
    assert np.isnan(model.get_weights()[0]).all() != is_guarded
    assert len(guarded.faults) == is_guarded


def test_draws_are_used_up() -> None:
    """Random numbers that layers drew for a skipped batch are not drawn again."""
    made = [model_under(layers=(keras.layers.Dropout(0.5, seed=3),)) for _ in range(2)]
    trained(made[0], data(nan_in_x), Guarded())
    trained(made[1], data(), Guarded())
    states = [model.layers[2].seed_generator.state.numpy().tolist() for model in made]
    assert states[0] == states[1]


def samples(factor: float = 1, absent: bool = False, batch: int = BATCH) -> tf.data.Dataset:
    """Returns many batches, one of which has labels multiplied by this factor, or is missing."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, BATCH, 5)).astype("float32")
    y = x[..., :1] * 3 + rng.normal(size=(60, BATCH, 1)).astype("float32")
    y[50] *= factor
    if absent:
        x, y = (np.delete(each, 50, axis=0) for each in (x, y))
    x, y = (each.reshape(-1, each.shape[-1]) for each in (x, y))
    options = tf.data.Options()
    options.autotune.enabled = False  # its thread delays the end of plain Keras' fit
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch).with_options(options)


@pytest.mark.parametrize("strategy", ["one", "mirrored"])
def test_outlier_norm(strategy: str) -> None:
    """With `max_score`, an update whose norm is an outlier is skipped."""
    well, guarded = Guarded(10.0), Guarded(10.0)
    bare = model_under(strategy).fit(samples(1), verbose=0).model
    assert bits(model_under(strategy).fit(samples(1), verbose=0, callbacks=[well]).model) == (
        bits(bare)
    )
    assert well.faults == []
    spiked = model_under(strategy).fit(samples(100), verbose=0, callbacks=[guarded]).model
    absent = model_under(strategy).fit(samples(1, absent=True), verbose=0).model
    assert bits(spiked) == bits(absent)
    assert {batch for batch, _ in guarded.faults} == {50}
    assert all(fault.score > 10 and fault.is_finite for _, fault in guarded.faults)
    assert all(fault.loss_score > 10 for _, fault in guarded.faults)
    known = guarded.gate.windows()
    assert {what: len(each) for what, each in known.items()} == {
        "optimizer, norms": 59,
        "optimizer, losses": 59,
    }


@pytest.mark.parametrize("strategy", ["one", "mirrored"])
def test_outlier_loss(strategy: str) -> None:
    """The same holds for an update whose loss is an outlier, although its gradients are not."""

    def model() -> keras.Model:
        return model_under(strategy, loss="mae")

    guarded = Guarded(10.0)
    spiked = model().fit(samples(1000), verbose=0, callbacks=[guarded]).model
    assert bits(spiked) == bits(model().fit(samples(absent=True), verbose=0).model)
    assert {batch for batch, _ in guarded.faults} == {50}
    assert all(fault.score < 10 < fault.loss_score for _, fault in guarded.faults)


@pytest.mark.parametrize("strategy", ["mirrored", "central"])
def test_mean_loss_of_all_samples(strategy: str) -> None:
    """The mean of all samples' losses is compared, regardless of how the batch is split."""
    windows = []
    for each in ("one", strategy):
        guarded = Guarded(1e9)
        model = model_under(each, lambda: keras.optimizers.SGD(0.01))
        model.layers[1].trainable = False  # otherwise statistics depend on the replica
        model.fit(samples(batch=7), verbose=0, callbacks=[guarded])
        windows.append(guarded.gate.windows())
    for what, values in windows[0].items():
        assert len(values) == 69
        assert windows[1][what] == pytest.approx(values, rel=1e-4), what
