"""How often the first step is traced: each time costs as long as a small model's epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
from support import small  # noqa: E402

import keras_distplug as kd  # noqa: E402


class Traced(keras.layers.Layer):
    """Counts the traces of a training step."""

    def __init__(self) -> None:
        super().__init__()
        self.traces = 0

    def call(self, inputs: Any, training: bool = False) -> Any:
        self.traces += training
        return inputs


class OwnStep(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def fit(
    *callbacks: keras.callbacks.Callback, cls: type = keras.Sequential, metric: Any = "mae"
) -> tuple[keras.Model, int]:
    keras.utils.set_random_seed(5)
    traced = Traced()
    drop, last = keras.layers.Dropout(0.3), keras.layers.Dense(1)
    model = cls([keras.Input((4,)), traced, keras.layers.Dense(8), drop, last])
    model.compile("adam", "mse", metrics=[metric])
    model.fit(small.dataset(), epochs=2, verbose=0, callbacks=list(callbacks))
    return model, traced.traces


def test_traced_once(tmp_path: Path) -> None:
    """Keras makes variables in the first step, so that TensorFlow traces it twice. Made before, it
    is traced once, and computes the same bits; also where it is resumed."""
    stock, traces = fit()
    assert traces == 2
    model, traces = fit(*kd.defaults(tmp_path))
    assert traces == 1
    assert small.state(model) == small.state(stock)


def test_resumed_between_epochs(tmp_path: Path) -> None:
    expected, _ = fit(*kd.defaults(tmp_path / "whole"))
    with pytest.raises(small.Interrupted):
        fit(*kd.defaults(tmp_path / "two"), small.Stop(1, 0))
    model, traces = fit(*kd.defaults(tmp_path / "two"))
    assert traces == 1
    assert small.state(model) == small.state(expected)


def test_own_step(tmp_path: Path) -> None:
    """What a `train_step` of the user's calls, and with what, is not known before."""
    assert fit(*kd.defaults(tmp_path), cls=OwnStep)[1] == 2


def test_what_works_in_the_step_only(tmp_path: Path) -> None:
    """A metric that fails outside the step: all is left to the step, as with Keras alone."""
    calls: list[object] = []

    def late(y_true: Any, y_pred: Any) -> Any:
        calls.append(y_pred)
        if len(calls) == 1:
            raise RuntimeError("not yet")
        return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)

    model, _ = fit(*kd.defaults(tmp_path), metric=late)
    assert len(calls) > 1
    expected, _ = fit(metric="mae")
    assert small.state(model) == small.state(expected)
