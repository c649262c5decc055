"""A small model and data that are sensitive to errors of distribution.

Loads TensorFlow: import it only in worker scripts and in tests marked `tf`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

SAMPLES, GLOBAL_BATCH, EPOCHS = (
    150,
    64,
    3,
)  # the last batch has 22 samples, which never divide equally
BATCHES = 3  # in an epoch


def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SAMPLES, 8, 8, 1)).astype("float32")
    y = rng.integers(0, 10, SAMPLES)
    sample_weight = rng.random(SAMPLES).astype("float32")
    return x, y, sample_weight


def dataset(samples: int = SAMPLES) -> tf.data.Dataset:
    x, y, w = arrays()
    whole = tf.data.Dataset.from_tensor_slices((x[:samples], y[:samples], w[:samples]))
    return whole.batch(GLOBAL_BATCH)


def build() -> keras.Model:
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, use_bias=False, kernel_regularizer="l2"),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.ReLU(),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.Adam(1e-3, global_clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(3)],
        weighted_metrics=["accuracy"],
    )
    return model


def write_outcome(
    path: Path,
    model: keras.Model,
    history: keras.callbacks.History,
    *,
    evaluated: Mapping[str, float],
    predicted: np.ndarray,
) -> None:
    """Writes everything that should not depend on the number of workers."""
    found: dict[str, Any] = {
        f"variable/{i:03d}/{v.path}": v.numpy()
        for i, v in enumerate([*model.weights, *model.optimizer.variables])
    }
    found |= {f"history/{name}": np.array(values) for name, values in history.history.items()}
    found |= {f"evaluate/{name}": np.array(value) for name, value in evaluated.items()}
    found["predict"] = predicted
    found["epochs"] = np.array(history.epoch)
    np.savez(path, **found)
