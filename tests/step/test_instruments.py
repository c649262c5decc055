"""Custom instruments: their arguments in a step, and their decisions."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from support.small import Watching  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.core.errors import ConfigurationError  # noqa: E402
from keras_distplug.step import instrumentation  # noqa: E402

X = np.random.default_rng(1).normal(size=(16, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
BATCHES = 4


class Norms(kd.StepInstrument):
    """Records the norm of every replica's own gradients."""

    def __init__(self) -> None:
        self.norms: list[tuple[int, float]] = []

    def after_gradients(self, step, optimizer, gradients):
        step.carried["norm"] = step.norm(gradients)
        return gradients

    def after_sum(self, step, optimizer, gradients):
        by_hand = tf.linalg.global_norm([each for each in gradients if each is not None])
        tf.debugging.assert_near(step.norm_of_sum(gradients), by_hand)
        return gradients

    def after(self, step, logs):
        tf.numpy_function(self._note, [step.replica, step.carried["norm"]], [])

    def _note(self, replica, norm):
        self.norms.append((int(replica), float(norm)))


class Refuses(kd.StepInstrument):
    """Allows no update."""

    decides = True

    def allows(self, step, optimizer, own, summed, variables):
        return tf.constant(False)


class Uses(Watching):
    def __init__(self, *instruments: Any) -> None:
        super().__init__()
        self.instruments = instruments

    def set_model(self, model):
        super().set_model(model)
        for each in self.instruments:
            kd.instrument_step(model, each)


def model(strategy: str = "one", **compiled: Any) -> keras.Model:
    scope = {
        "one": tf.distribute.get_strategy,
        "mirrored": lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
        "central": lambda: tf.distribute.experimental.CentralStorageStrategy(
            ["CPU:0", "CPU:1"], "CPU:0"
        ),
    }
    with scope[strategy]().scope():
        keras.utils.set_random_seed(1)
        made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        made.compile("sgd", "mse", **compiled)
    return made


def fit(trained: keras.Model, *callbacks: Any) -> None:
    trained.fit(X, Y, batch_size=4, shuffle=False, verbose=0, callbacks=list(callbacks))


@pytest.mark.parametrize(
    ("strategy", "compiled"),
    [
        ("one", {}),
        ("one", {"jit_compile": True}),
        ("one", {"run_eagerly": True}),
        ("mirrored", {}),
        ("central", {}),
    ],
)
def test_measured(strategy: str, compiled: dict[str, Any]) -> None:
    """An instrument sees every step of every replica, and does not change the weights."""
    plain, measured, norms = model(strategy, **compiled), model(strategy, **compiled), Norms()
    kd.adapt(plain)
    fit(plain)
    fit(measured, Uses(norms))
    replicas = 1 if strategy == "one" else 2
    assert sorted(replica for replica, _ in norms.norms) == sorted([*range(replicas)] * BATCHES)
    assert all(norm > 0 for _, norm in norms.norms)
    for one, other in zip(plain.get_weights(), measured.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("strategy", ["one", "mirrored"])
def test_refused(strategy: str) -> None:
    """A step whose update is not allowed leaves no changes, also if other instruments measure."""
    trained, norms = model(strategy), Norms()
    before = trained.get_weights()
    fit(trained, kd.NaNWatchdog(), Uses(Refuses(), norms))
    for one, other in zip(before, trained.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert int(trained.optimizer.iterations.numpy()) == 0
    assert len(norms.norms) == BATCHES * (2 if strategy == "mirrored" else 1)


def test_removed_after_fit() -> None:
    """An instrument is not in the next `fit` without it, nor in an `evaluate` with it."""
    trained, norms = model(), Norms()
    fit(trained, Uses(norms))
    fit(trained)
    assert len(norms.norms) == BATCHES
    trained.evaluate(X, Y, verbose=0, callbacks=[Uses(norms)])
    assert len(norms.norms) == BATCHES
    fit(trained, Uses(norms))
    assert len(norms.norms) == 2 * BATCHES


def test_retraced() -> None:
    """A step is only traced again if an instrument would build other operations."""

    class Scales(kd.StepInstrument):
        factor, traces = 1.0, 0

        def signature(self):
            return self.factor

        def before(self, step, batch):
            self.traces += 1
            return tf.nest.map_structure(lambda each: each * self.factor, batch)

    trained, scales = model(), Scales()
    fit(trained, Uses(scales))
    traces = scales.traces
    assert traces > 0
    fit(trained, Uses(scales))
    assert scales.traces == traces
    scales.factor = 0.0
    before = trained.get_weights()
    fit(trained, Uses(scales))
    assert scales.traces > traces
    # Inputs of 0 leave the weights unchanged.
    np.testing.assert_array_equal(before[0], trained.get_weights()[0])


def test_no_instrument() -> None:
    with pytest.raises(ConfigurationError, match="Expected `instrument` to be a"):
        fit(model(), Uses(object()))


def test_parameter_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that run steps independently cannot report to an instrument, which is refused."""
    monkeypatch.setattr(instrumentation, "is_scheduled", lambda strategy: True)
    with pytest.raises(ConfigurationError, match="under ParameterServerStrategy"):
        kd.instrument_step(model(), Norms())
