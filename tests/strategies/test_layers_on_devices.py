"""Layers placed with `tf.device`: a resumed run computes on the same devices as before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402
from support import small  # noqa: E402

import keras_distplug as kd  # noqa: E402


class On(keras.layers.Layer):
    """Keeps its weights and computes on a device."""

    def __init__(self, device: str, units: int) -> None:
        super().__init__()
        self.device, self.units = device, units

    def build(self, shape: Any) -> None:
        with tf.device(self.device):
            self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")

    def call(self, x: Any) -> Any:
        with tf.device(self.device):
            return keras.ops.tanh(keras.ops.matmul(x, self.kernel))


class Stages(keras.Model):
    """A pipeline over two devices that Keras cannot build automatically."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = On("CPU:0", 8), On("CPU:1", 1)
        self.dropout = keras.layers.Dropout(0.3)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.last(self.dropout(self.first(x), training=training))


def branches() -> keras.Model:
    x = keras.Input((4,))
    both = keras.layers.Concatenate()([On("CPU:0", 4)(x), On("CPU:1", 4)(x)])
    return keras.Model(x, On("CPU:1", 1)(keras.layers.Dropout(0.3)(both)))


def said_to_be_built() -> keras.Model:
    """Returns a model that Keras considers built, although its layers are not."""
    model = Stages()
    with pytest.warns(UserWarning, match="does not have a `build"):
        model.build((None, 4))
    assert model.built
    assert not model.first.built
    return model


MODELS: dict[str, Callable[[], keras.Model]] = {
    "stages": Stages,
    "branches": branches,
    "said to be built": said_to_be_built,
}


def fit(name: str, *callbacks: keras.callbacks.Callback) -> Any:
    keras.utils.set_random_seed(5)
    model = MODELS[name]()
    model.compile("adam", "mse")
    history = model.fit(small.dataset(), epochs=3, verbose=0, callbacks=list(callbacks))
    variables = [*model.variables, *model.optimizer.variables]
    return small.state(model), history.history, [each.value.device for each in variables]


@pytest.mark.parametrize("name", MODELS)
def test_interrupted(name: str, tmp_path: Path) -> None:
    """An interrupted run gives the bits of plain Keras, with weights and optimizer slots on the
    same devices."""
    plain = fit(name)

    def backup(folder: str) -> kd.BackupAndRestore:
        where = tmp_path / folder
        return kd.BackupAndRestore(where, save_freq=1, on_busy="wait", delete_checkpoint=False)

    assert fit(name, backup("whole")) == plain
    for place in [(1, 1), (1, 3)]:
        with pytest.raises(small.Interrupted):
            fit(name, small.Stop(*place), backup(f"{place}"))
        assert fit(name, backup(f"{place}")) == plain, place
