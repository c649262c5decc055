"""Trains until a worker is killed, as FOLDER/faults.json says, and says how it ended.

    python lost.py FOLDER [save | wait | catch]

An epoch has 3 batches. save: a checkpoint behind each of them, for which the workers wait for each
other. wait: behind the step of the fault all are in a function of their own until TensorFlow has
noticed. catch: the error is caught, and the code is 7.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

folder, options = Path(sys.argv[1]), sys.argv[2:]

import keras  # noqa: E402

import keras_distplug as kd  # noqa: E402

by_environment = "KERAS_DISTPLUG_HEARTBEAT_TIMEOUT" in os.environ
strategy = kd.init(heartbeat_timeout_secs=None if by_environment else 3.0)

from support import digits_like as case  # noqa: E402
from support import fault  # noqa: E402
from support.harm import Harm  # noqa: E402

from keras_distplug.backend.tensorflow.runtime.context import ServiceKeyValues  # noqa: E402

print(f"heartbeat: {ServiceKeyValues().heartbeat_timeout_s} s")


class Wait(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        [death] = harm.faults
        if harm.epoch * case.BATCHES + batch == death.at_step:
            while not fault.fired(folder):
                time.sleep(0.05)
            time.sleep(5)  # until TensorFlow has noticed


harm = Harm(folder, case.BATCHES, 1, folder / "runs")
with strategy.scope():
    model = case.build()
saves = {"save_freq": 1 if "save" in options else "epoch", "on_busy": "wait"}
try:
    model.fit(
        case.dataset(),
        epochs=4,
        callbacks=[
            harm,
            *([Wait()] if "wait" in options else []),
            kd.BackupAndRestore(folder / "runs", **saves),
            kd.RunLog(folder),
        ],
        validation_data=case.dataset(70),
        verbose=0,
    )
except kd.errors.PeerLostError as error:
    [death] = fault.fired(folder)
    print(f"after {time.time() - death.at:.1f} s")
    if "catch" not in options:
        raise
    print(f"caught: {error}")
    sys.exit(7)
