"""Updates that are computed before it is known if they are applied."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from support.optimizers import OPTIMIZERS  # noqa: E402

from keras_distplug.backend.tensorflow.replicas import ahead  # noqa: E402

# With weight decay, an average of the weights and a schedule, more variables change in a step.
EVERYTHING = {"weight_decay": 0.01, "use_ema": True, "global_clipnorm": 1.0}


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_WORTH_BYTES", 0)


def make(
    name: str, **given: Any
) -> tuple[keras.optimizers.Optimizer, list[keras.Variable], list[bool]]:
    """Returns an optimizer, its variables, and a list that receives if updates are ahead."""
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.9)
    optimizer = getattr(keras.optimizers, name)(rate, **given)
    variables = [
        keras.Variable(np.random.default_rng(i).normal(size=shape), dtype="float32", name=f"v{i}")
        for i, shape in enumerate([(4, 3), (3,)])
    ]
    variables[0].constraint = keras.constraints.NonNeg()
    optimizer.build(variables)
    return optimizer, variables, []


def grads(value: Any) -> list[tf.Tensor]:
    return [tf.fill([4, 3], value), tf.fill([3], value)]


def state(optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]) -> list[bytes]:
    return [each.numpy().tobytes() for each in [*optimizer.variables, *variables]]


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str, keeps: bool) -> None:
    """Not a bit changes if a step is skipped; otherwise the update is the usual one, and what
    follows in the step reads the new values. The same if the caller keeps the previous values."""
    optimizer, variables, were_ahead = make(name, **EVERYTHING)
    stock, stock_variables, _ = make(name, **EVERYTHING)

    @tf.function(autograph=False)
    def update(ok: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        given = grads(value)
        kept: list[tuple[tf.Variable, tf.Tensor]] = []
        keep = (lambda native, previous: kept.append((native, previous))) if keeps else None
        were_ahead.append(
            ahead.apply_if(
                ok, optimizer, variables, given, lambda: optimizer.apply(given, variables), keep
            )
        )
        assert bool(kept) == keeps

        def put_back() -> None:
            for native, previous in kept:
                native.assign(previous)

        read_after = tf.reduce_sum(variables[0])
        tf.cond(ok, lambda: None, put_back)
        return read_after

    @tf.function(autograph=False)
    def as_always(value: tf.Tensor) -> None:
        stock.apply(grads(value), stock_variables)

    for value in (0.5, -0.25):
        try:
            as_always(tf.constant(value))
        except AttributeError:  # Muon of Keras 3.10 uses the `path` of a tf.Variable
            pytest.skip("Keras' own version does not work on TensorFlow")
        read_after = update(tf.constant(True), tf.constant(value))
        before = state(optimizer, variables)
        assert before == state(stock, stock_variables)
        assert float(read_after) == float(tf.reduce_sum(variables[0]))
        update(tf.constant(False), tf.constant(float("nan")))
        assert state(optimizer, variables) == before
    assert were_ahead == [True]


@pytest.mark.parametrize(
    "unsuitable",
    ["accumulates", "overwrites", "scales", "is custom", "sparse", "branch", "large", "small"],
)
def test_unsuitable_updates(unsuitable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If updates cannot be computed ahead, or should not, the variables are left alone, and the
    optimizer works as usual."""

    class Custom(keras.optimizers.SGD):
        pass

    given = {
        "accumulates": {"gradient_accumulation_steps": 2},
        "overwrites": {"use_ema": True, "ema_overwrite_frequency": 2},
    }
    optimizer, variables, were_ahead = make("SGD", **given.get(unsuitable, {}))
    if unsuitable == "scales":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    elif unsuitable == "is custom":
        optimizer = Custom(0.1)
    elif unsuitable in ("large", "small"):
        monkeypatch.setattr(ahead, "_MOST_BYTES", 59 if unsuitable == "large" else 2**30)
        monkeypatch.setattr(ahead, "_WORTH_BYTES", 61 if unsuitable == "small" else 0)  # of 60
    optimizer.build(variables)
    before = state(optimizer, variables)

    @tf.function(autograph=False)
    def update() -> None:
        dense = grads(0.5)
        rows = tf.IndexedSlices(tf.fill([1, 3], 0.5), tf.constant([1]), tf.constant([4, 3]))
        passed = [rows, dense[1]] if unsuitable == "sparse" else dense

        def apply() -> None:
            if unsuitable == "branch":
                tf.cond(tf.constant(True), lambda: optimizer.apply(dense, variables), lambda: None)
            else:
                optimizer.apply(passed, variables)

        were_ahead.append(ahead.apply_if(tf.constant(True), optimizer, variables, passed, apply))

    update()
    assert were_ahead == [False]
    assert state(optimizer, variables) == before
    optimizer.apply(grads(0.5), variables)
    assert state(optimizer, variables) != before
