"""Models that several benchmarks train, and data of the right shapes."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf


def perceptron() -> keras.Model:
    """Returns a perceptron with 2.6 M weights."""
    layers = keras.layers
    hidden = (layers.Dense(1024, activation="relu") for _ in range(3))
    return compiled(keras.Sequential([keras.Input((512,)), *hidden, layers.Dense(10)]))


def convolutional(normalization: Callable[[], keras.Layer] | None = None) -> keras.Model:
    """Returns a convolutional network with 19 thousand weights.

    `normalization`, if given, creates a layer to add after every convolution."""
    layers = keras.layers
    hidden: list[keras.Layer] = []
    for filters in (16, 32, 32):
        hidden.append(layers.Conv2D(filters, 3, padding="same"))
        if normalization:
            hidden.append(normalization())
        hidden += [layers.ReLU(), layers.MaxPooling2D()]
    return compiled(
        keras.Sequential([keras.Input((32, 32, 3)), *hidden, layers.Flatten(), layers.Dense(10)])
    )


def compiled(model: keras.Model) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def one_batch_for(model: keras.Model, batch: int) -> tf.data.Dataset:
    """Returns an endless dataset of the same batch, so that reading takes no time."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch, *model.input_shape[1:])).astype("float32")
    return tf.data.Dataset.from_tensors((x, rng.integers(0, 10, batch))).repeat()
