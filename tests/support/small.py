"""The smallest model and data that reveal errors of a resumed run. Loads TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_distplug.checkpoint import opening, saver

X = np.random.default_rng(0).normal(size=(30, 4)).astype("float32")
Y = (X[:, :1] ** 2).astype("float32")
BATCHES = 4  # batches of 8; the last one has 6
counted = 0  # a number that tests may change


class Interrupted(Exception):
    """The exception by which tests interrupt training."""


class Watching(keras.callbacks.Callback):
    """A stateless callback: its records belong to this process only."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Stop(Watching):
    """Interrupts training once, after a number of batches in an epoch. Counts all batches."""

    def __init__(self, epoch: int = -1, batch: int = 0) -> None:
        super().__init__()
        self.at = (epoch, batch)
        self.batches = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        if (self.epoch, batch) == self.at:
            raise Interrupted


def start_process() -> None:
    """Makes the test's subsequent actions count as another process."""
    saver.wait_for_all()
    opening.finished_here.clear()


def model(seed: int = 5) -> keras.Model:
    keras.utils.set_random_seed(seed)
    made = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(1),
        ]
    )
    made.compile("adam", "mse", metrics=["mae"])
    return made


def dataset() -> tf.data.Dataset:
    whole = tf.data.Dataset.from_tensor_slices((X, Y))
    return whole.shuffle(30, seed=1, reshuffle_each_iteration=True).batch(8)


class Batches(keras.utils.PyDataset):
    """The data as a `PyDataset`."""

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(8 * index, 8 * index + 8)
        return X[rows], Y[rows]


INPUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 8},
    "tf.data": lambda: {"x": dataset()},
    "function": lambda: {"x": dataset},
    "PyDataset": lambda: {"x": Batches()},
}


def state(trained: keras.Model) -> list[bytes]:
    """Returns the bits of all variables."""
    return [v.numpy().tobytes() for v in [*trained.variables, *trained.optimizer.variables]]
