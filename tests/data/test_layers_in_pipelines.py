"""Random layers of Keras in the pipelines that `fit` reads, for training and for validation."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402
from support import small  # noqa: E402

import keras_distplug as kd  # noqa: E402

EPOCHS = 3
STRATEGIES = {
    "one": tf.distribute.get_strategy,
    "mirrored": lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
}


def noisy(seed: int) -> tf.data.Dataset:
    noise = keras.layers.GaussianNoise(0.5, seed=seed)
    return small.dataset().map(lambda x, y: (noise(x, training=True), y)).prefetch(2)


def fit(*callbacks: keras.callbacks.Callback, strategy: str) -> tuple[list[bytes], object]:
    devices = ["CPU:0"] if strategy == "one" else ["CPU:0", "CPU:1"]
    with (
        tf.distribute.MirroredStrategy(devices).scope() if len(devices) > 1 else tf.device("CPU:0")
    ):
        model = small.model()
    if strategy == "mirrored":
        kd.adapt(model)
    history = model.fit(
        noisy(1), validation_data=noisy(2), epochs=EPOCHS, verbose=0, callbacks=list(callbacks)
    )
    return small.state(model), history.history


def backup(folder: Path) -> keras.callbacks.Callback:
    return kd.BackupAndRestore(folder, save_freq=1, on_busy="wait", delete_checkpoint=False)


@pytest.mark.parametrize(("epoch", "batch"), [(1, 1), (2, 0)])
@pytest.mark.parametrize("strategy", ["one", "mirrored"])
def test_interrupted(strategy: str, epoch: int, batch: int, tmp_path: Path) -> None:
    """With this package's callbacks, interrupted or not, a training computes the same as plain
    Keras: the layers' seeds continue from epoch to epoch, and are restored."""
    plain = fit(strategy=strategy)
    assert fit(backup(tmp_path / "whole"), strategy=strategy) == plain
    with pytest.raises(small.Interrupted):
        fit(backup(tmp_path / "two"), small.Stop(epoch, batch), strategy=strategy)
    assert fit(backup(tmp_path / "two"), strategy=strategy) == plain
