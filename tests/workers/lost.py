"""Trains until a worker of the cluster kills itself, and says how it ended.

    python lost.py FOLDER WORKER MOMENT [END]

WORKER kills itself by SIGKILL in the second epoch, and notes in FOLDER/killed that it does. MOMENT:
`step`, behind a batch, while the others compute the next one; `validation`; `save`, while the
others wait for its word in a checkpoint; `callback`, while the others are in a function of their
own. END: `caught`, to catch the error, and leave with the code 7.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

folder, victim, moment, end = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]

import keras  # noqa: E402

import keras_distplug as kd  # noqa: E402

by_environment = "KERAS_DISTPLUG_HEARTBEAT_TIMEOUT" in os.environ
strategy = kd.init(heartbeat_timeout_secs=None if by_environment else 3.0)
is_victim = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == victim

from support import digits_like as case  # noqa: E402

from keras_distplug.compat.context import ServiceKeyValues  # noqa: E402

print(f"heartbeat: {ServiceKeyValues().heartbeat_timeout_s} s")


class Die(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (1, 1) and moment in ("step", "save", "callback"):
            self.die()
            if moment == "callback":
                while not (folder / "killed").exists():
                    time.sleep(0.05)
                time.sleep(5)  # until TensorFlow has noticed

    def on_test_batch_end(self, batch, logs=None):
        if self.epoch == 1 and moment == "validation":
            self.die()

    def die(self):
        if is_victim:
            (folder / "killed").write_text(f"{time.time()}")
            os.kill(os.getpid(), signal.SIGKILL)


with strategy.scope():
    model = case.build()
saves = {"save_freq": 1 if moment == "save" else "epoch", "on_busy": "wait"}
try:
    model.fit(
        case.dataset(),
        epochs=4,
        callbacks=[Die(), kd.BackupAndRestore(folder / "runs", **saves), kd.RunLog(folder)],
        validation_data=case.dataset(70),
        verbose=0,
    )
except kd.errors.PeerLostError as error:
    print(f"after {time.time() - float((folder / 'killed').read_text()):.1f} s")
    if not end:
        raise
    print(f"caught: {error}")
    sys.exit(7)
