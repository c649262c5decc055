"""Gradients that are products have the same bits with and without callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
import numpy as np  # noqa: E402
from keras import layers  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.backend.tensorflow.replicas import products  # noqa: E402

BATCH, BATCHES = 8, 6
X = np.random.default_rng(0).normal(size=(BATCH * BATCHES, 6, 6, 2)).astype("float32")
Y = np.random.default_rng(1).normal(size=(BATCH * BATCHES, 1)).astype("float32")


def trained(
    x: np.ndarray, y: np.ndarray, callbacks: list[keras.callbacks.Callback], **given: Any
) -> list[bytes]:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(8, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(8),
            layers.BatchNormalization(),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.01, **given), "mse", jit_compile=False)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    variables = [*model.variables, *model.optimizer.variables]
    return [each.numpy().tobytes() for each in variables if "seed" not in each.path]


@pytest.mark.parametrize(
    "given",
    [
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"momentum": 0.9, "clipvalue": 0.1},
    ],
    ids=["momentum", "nesterov", "clipped"],
)
def test_same_bits(given: dict[str, Any], tmp_path: Path) -> None:
    assert trained(X, Y, kd.defaults(tmp_path), **given) == trained(X, Y, [], **given)


def test_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails once TensorFlow no longer reorders such products."""
    plain = trained(X, Y, [], momentum=0.9)
    monkeypatch.setattr(products, "are_reordered", lambda optimizer, gradients: False)
    assert trained(X, Y, [kd.NaNWatchdog()], momentum=0.9) != plain


def test_not_finite(caplog: pytest.LogCaptureFixture) -> None:
    """An update whose products are not finite is skipped."""
    damaged = X.copy()
    damaged[BATCH : 2 * BATCH] = np.nan
    others = np.r_[0:BATCH, 2 * BATCH : len(X)]
    found = trained(damaged, Y, [kd.NaNWatchdog()], momentum=0.9)
    assert caplog.text.count("an update was skipped") == 1
    assert found == trained(X[others], Y[others], [], momentum=0.9)
