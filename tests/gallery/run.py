"""Runs a script of the gallery, and writes what it has trained.

    python run.py SCRIPT FOLDER HOW REPLICAS

HOW is `plain` (without our callbacks), `ours`, or `killed` (with ours, by SIGKILL after some
batches). With two REPLICAS, the script runs in the scope of a MirroredStrategy. FOLDER/HOW.json
gets the hash of the trained weights, the `History`, and warnings.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

BATCHES = 7  # until the kill, with a checkpoint of the last but one
script, folder, how, replicas = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])


class Kill(keras.callbacks.Callback):
    """Ends the process after some batches. Comes before our callbacks, so that they do not see the
    last one."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        if self.batches == BATCHES:
            (folder / "fired").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def callbacks(directory: Path, **given: Any) -> list[keras.callbacks.Callback]:
    if how == "plain":
        return []
    kill = [Kill()] if how == "killed" else []
    backup = kd.BackupAndRestore(directory, on_busy="wait", delete_checkpoint=False, **given)
    return [*kill, backup, *defaults(directory, **given)]


defaults, kd.defaults = kd.defaults, callbacks
sys.argv = [script, str(folder)]
strategy = tf.distribute.get_strategy()
if replicas > 1:
    devices = [tf.config.LogicalDeviceConfiguration()] * replicas
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(replicas)])
with warnings.catch_warnings(record=True) as caught, strategy.scope():
    warnings.simplefilter("always")
    found = runpy.run_path(script, run_name="__main__")
weights = b"".join(np.asarray(w).tobytes() for w in found["model"].get_weights())
result = {
    "weights": hashlib.sha256(weights).hexdigest(),
    "history": found["history"].history,
    "warnings": [str(each.message) for each in caught if "distplug" in each.filename],
}
(folder / f"{how}.json").write_text(json.dumps(result, default=np.ndarray.tolist))
