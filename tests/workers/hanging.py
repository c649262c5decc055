"""Trains with a `HangWatchdog`, and hangs where it is told to.

    python hanging.py FOLDER [TOLD ...]

TOLD: `attempt:worker:epoch:batch:how`, all counted from 0. Each is noted in FOLDER/told before it
happens. How: `slow` (longer than a step may take, but not than a callback), `stopped` (SIGSTOP),
`locked` (code in C keeps the interpreter's lock), `astray` (waits for a collective that nobody else
calls), each behind the batch; or `input` (the batch never comes).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from pathlib import Path

folder, told = Path(sys.argv[1]), [each.split(":") for each in sys.argv[2:]]

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

import keras_distplug as kd  # noqa: E402

strategy = kd.init()
tf_config = json.loads(os.environ.get("TF_CONFIG", "{}"))
worker = tf_config["task"]["index"] if tf_config else 0
attempt = os.environ.get("KERAS_DISTPLUG_ATTEMPT", "0")

from support import digits_like as case  # noqa: E402


def hang(epoch: int, batch: int, *hows: str) -> None:
    for *place, how in told:
        if place == [attempt, str(worker), str(epoch), str(batch)] and how in hows:
            with open(folder / "told", "a") as file:
                file.write(":".join([*place, how]) + "\n")
            HOW[how]()


STEP_SECS, SAVE_SECS = 10, 15  # of which a busy machine takes some
HOW = {
    "slow": lambda: threading.Event().wait((STEP_SECS + SAVE_SECS) / 2),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "locked": lambda: ctypes.PyDLL(None).sleep(10_000),
    "input": lambda: threading.Event().wait(),
    "astray": lambda: strategy.run(
        lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.ones(()))
    ),
}


class Hang(keras.callbacks.Callback):
    epoch = -1

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        hang(self.epoch, batch, "slow", "stopped", "locked", "astray")


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return len(x) // case.GLOBAL_BATCH

    def __getitem__(self, number):
        hang(callback.epoch, number, "input")
        part = slice(number * case.GLOBAL_BATCH, (number + 1) * case.GLOBAL_BATCH)
        return x[part], y[part], sample_weight[part]


callback = Hang()
model = case.build()
x, y, sample_weight = case.arrays()
history = kd.distributed_fit(
    model,
    Batches(),
    epochs=3,
    callbacks=[
        callback,
        kd.BackupAndRestore(folder / "runs", save_freq=2, delete_checkpoint=False),
        kd.HangWatchdog(step_secs=STEP_SECS, save_secs=SAVE_SECS),
    ],
    verbose=2,
)
case.write_outcome(folder / f"outcome-{worker}.npz", model, history, evaluated={}, predicted=x[:0])
