"""The script of `test_forked_workers.py`, for `keras-distplug run`: FOLDER none|kill"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

if sys.argv[2] == "kill":  # the fork server must know it, because it is read on import
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np

import keras_distplug as kd

folder, fault = Path(sys.argv[1]), sys.argv[2]
strategy = kd.init()
attempt = int(os.environ["KERAS_DISTPLUG_ATTEMPT"])
index = strategy.cluster_resolver.task_id if strategy.num_replicas_in_sync > 1 else 0


def is_server_ready() -> bool:
    """Returns True while the supervisor's fork server waits for requests."""
    names = Path("/proc").glob("[0-9]*/comm")
    supervisor = os.getppid()
    for name in names:
        try:
            if name.read_text() != "fork-server\n":
                continue
            status = name.with_name("stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(status[1]) == supervisor:
            return True
    return False


class Kill(keras.callbacks.Callback):  # type: ignore[misc]
    """The last worker kills itself in its 7th step, once a fork server is ready."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        is_last = index == strategy.num_replicas_in_sync - 1
        step = int(self.model.optimizer.iterations.numpy())
        if fault == "kill" and attempt == 0 and is_last and step == 7:
            end_s = time.monotonic() + 60
            while not is_server_ready():
                assert time.monotonic() < end_s, "no fork server"
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)


keras.utils.set_random_seed(5)
model = keras.Sequential(
    [
        keras.Input((6,)),
        keras.layers.Dense(8, "relu"),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(1),
    ]
)
model.compile("adam", "mse")
x = np.random.default_rng(1).normal(size=(80, 6)).astype("float32")
history = kd.distributed_fit(
    model,
    x,
    x[:, :1],
    batch_size=16,
    epochs=3,
    verbose=0,
    callbacks=[Kill(), kd.BackupAndRestore(folder / "runs", save_freq=3)],
)
state = {f"weight_{n}": value for n, value in enumerate(model.get_weights())}
state |= {f"slot_{n}": np.asarray(v) for n, v in enumerate(model.optimizer.variables)}
np.savez(folder / f"{index}.npz", loss=history.history["loss"], **state)
