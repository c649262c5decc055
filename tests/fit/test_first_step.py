"""The number of traces of the first step: one takes as long as a small model's epoch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
from support import small  # noqa: E402

import keras_distplug as kd  # noqa: E402


class Counted(keras.optimizers.Adam):
    """Counts how often a step with it is traced."""

    traces = 0

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        self.traces += 1
        return super().apply(*args, **kwargs)


class OwnStep(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


class Auxiliary(keras.Model):
    """With a second head while it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.second = keras.layers.Dense(1), keras.layers.Dense(1)

    def call(self, inputs: Any, training: bool = False) -> Any:
        first, second = self.head(inputs), self.second(inputs)
        return (first, second) if training else first


def fit(
    *callbacks: keras.callbacks.Callback, cls: type = keras.Sequential, metric: Any = "mae"
) -> keras.Model:
    keras.utils.set_random_seed(5)
    dropout, last = keras.layers.Dropout(0.3), keras.layers.Dense(1)
    model = cls([keras.Input((4,)), keras.layers.Dense(8), dropout, last])
    model.compile(Counted(), "mse", metrics=[metric])
    model.fit(small.dataset(), epochs=2, verbose=0, callbacks=list(callbacks))
    return model


def fit_auxiliary(*callbacks: keras.callbacks.Callback) -> keras.Model:
    keras.utils.set_random_seed(5)
    model = Auxiliary()
    model(small.X[:1])
    model.compile(Counted(), ["mse", "mae"], metrics=[["mae"], ["mse"]])
    data = small.dataset().map(lambda x, y: (x, (y, y)))
    model.fit(data, epochs=2, verbose=0, callbacks=list(callbacks))
    return model


@pytest.mark.parametrize("fit", [fit, fit_auxiliary])
def test_traced_once(fit: Callable[..., keras.Model], tmp_path: Path) -> None:
    """Keras makes variables in the first step, so that TensorFlow traces it twice. Made before, for
    what the model gives in training, it is traced once, and computes the same bits, also when it is
    resumed."""
    expected = fit()
    assert expected.optimizer.traces == 2
    with pytest.raises(small.Interrupted):
        fit(*kd.defaults(tmp_path, save_freq="epoch"), small.Stop(1, 0))
    resumed, whole = (
        fit(*kd.defaults(tmp_path, save_freq="epoch")),
        fit(*kd.defaults(tmp_path, save_freq="epoch", resume=False)),
    )
    for model in resumed, whole:
        assert model.optimizer.traces == 1
        assert small.state(model) == small.state(expected)


def test_own_step(tmp_path: Path) -> None:
    """The calls of a custom `train_step`, and their arguments, are not known in advance."""
    assert fit(*kd.defaults(tmp_path, save_freq="epoch"), cls=OwnStep).optimizer.traces == 2


def test_what_works_in_the_step_only(tmp_path: Path) -> None:
    """A metric that fails outside the step: all is left to the step, as with Keras alone."""
    calls: list[object] = []

    def late(y_true: Any, y_pred: Any) -> Any:
        calls.append(y_pred)
        if len(calls) == 1:
            raise RuntimeError("not yet")
        return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)

    model = fit(*kd.defaults(tmp_path, save_freq="epoch"), metric=late)
    assert len(calls) > 1
    assert small.state(model) == small.state(fit(metric="mae"))
