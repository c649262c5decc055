"""Trains in FOLDER/runs, with a checkpoint every two steps, and prints a hash of the weights.

    python owned.py FOLDER [wait|stop]

An owner counts as dead after a second without a heartbeat. wait: after the ninth step, it waits
until FOLDER/gate, a named pipe, is opened for writing. stop: it stops itself there with SIGSTOP.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import keras_distplug as kd
from keras_distplug.checkpoint import saver
from keras_distplug.storage import ownership

folder, how = Path(sys.argv[1]), sys.argv[2:]
ownership.TIMING = ownership.Timing(beat_secs=0.1, stale_secs=1.0, look_secs=0.02)


class Pause(keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if how and int(self.model.optimizer.iterations) == 9:
            how.clear()
            if "wait" in sys.argv:
                saver.wait_for_all()
                print("pauses", flush=True)
                (folder / "gate").open().read()
            else:
                print("pauses", flush=True)
                os.kill(os.getpid(), signal.SIGSTOP)


keras.utils.set_random_seed(1)
layers = [keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dropout(0.2)]
model = keras.Sequential([*layers, keras.layers.Dense(1)])
model.compile("adam", "mse")
x = np.random.default_rng(0).random((64, 4), dtype="float32")
saving = kd.Saving(on_busy="wait")
backup = kd.BackupAndRestore(folder / "runs", 2, delete_checkpoint=False, saving=saving)
model.fit(x, x[:, :1], batch_size=16, epochs=5, verbose=0, callbacks=[Pause(), backup])
weights = b"".join(each.tobytes() for each in model.get_weights())
print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
