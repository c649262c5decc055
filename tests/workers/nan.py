"""Trains with and without NaN in the data, on the workers of TF_CONFIG."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras_distplug as kd

STRATEGY = kd.init()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

BATCH = 12
EPOCHS = 1
SHARED = Path(sys.argv[1])


def samples(nan_in: Sequence[int] = (), absent: Sequence[int] = ()) -> tf.data.Dataset:
    """Returns eight batches.

    Args:
        nan_in: Batches with a NaN in the last sample, which belongs to the last replica.
        absent: Batches to omit.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, BATCH, 6)).astype("float32")
    y = x[..., :1] * 2
    for batch in nan_in:
        x[batch, -1, 3] = np.nan
    kept = [batch for batch in range(8) if batch not in absent]
    x, y = (each[kept].reshape(-1, each.shape[-1]) for each in (x, y))
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


def model() -> keras.Model:
    with STRATEGY.scope():
        keras.utils.set_random_seed(1)
        made = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(16, activation="tanh"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )
        made.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return kd.adapt(made)


class Ends(keras.callbacks.Callback):
    """Waits in every batch for the previous save, so that the checkpoints are deterministic."""

    def __init__(self, backup: kd.BackupAndRestore) -> None:
        super().__init__()
        self.backup = backup

    def on_train_batch_begin(self, batch, logs=None):
        for saves in self.backup._all_saves:
            saves.wait()


def trained(name: str, data: tf.data.Dataset, watchdog: kd.NaNWatchdog | None) -> dict[str, Any]:
    """Returns the bits of the weights, and the reports."""
    reported: list[str] = []
    culprits: list[list[int]] = []
    callbacks: list[keras.callbacks.Callback] = []
    if watchdog is not None:

        def note(fault: Any) -> None:
            reported.append(str(fault))
            culprits.append([each.replica for each in fault.culprits])

        watchdog.on_fault = note
        backup = kd.BackupAndRestore(SHARED / name, save_freq=4, delete_checkpoint=False)
        callbacks = [backup, Ends(backup), watchdog]
    made = model()
    try:
        history = made.fit(data, epochs=EPOCHS, verbose=0, callbacks=callbacks).history
        error = ""
    except kd.errors.NonFiniteError as stopped:
        history, error = {}, str(stopped)
    digest = hashlib.sha256()
    for variable in (*made.variables, *made.optimizer.variables):
        if variable.synchronization != "on_read":
            digest.update(np.asarray(variable.value).tobytes())
    return {
        "bits": digest.hexdigest(),
        "history": history,
        "error": error,
        "reported": reported,
        "culprits": culprits,
    }


def main() -> None:
    cases: dict[str, dict[str, Any]] = {
        "bare": trained("bare", samples(), None),
        "watched": trained("watched", samples(), kd.NaNWatchdog()),
        "skip": trained("skip", samples(nan_in=[3]), kd.NaNWatchdog()),
        "absent": trained("absent", samples(absent=[3]), None),
        "back": trained("back", samples(nan_in=[5, 6]), kd.NaNWatchdog(max_skips=1)),
        "absent since": trained("absent since", samples(absent=[4, 5, 6]), None),
        "no more": trained("no more", samples(nan_in=range(1, 8)), kd.NaNWatchdog(max_skips=1)),
    }
    print("FOUND " + json.dumps(cases), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)
