"""Runs a script of the gallery, and writes its result.

    python run.py SCRIPT FOLDER HOW REPLICAS BATCHES

HOW is `plain` (without our callbacks), `ours`, or `killed` (with ours, by SIGKILL after BATCHES
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
from keras_distplug.checkpoint import saver

script, folder, how = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
replicas, batches_to_kill = int(sys.argv[4]), int(sys.argv[5])


class Kill(keras.callbacks.Callback):
    """Ends the process after some batches of all its fits, once the checkpoints made so far are
    written. Comes before our callbacks, so that they do not see the last batch."""

    batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        Kill.batches += 1
        if Kill.batches >= batches_to_kill:
            saver.wait_for_all()
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
    "warnings": [
        str(each.message)
        for each in caught
        if "distplug" in each.filename and "is newer than the versions" not in str(each.message)
    ],
}
(folder / f"{how}.json").write_text(json.dumps(result, default=np.ndarray.tolist))
