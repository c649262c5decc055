"""Three fits with one folder: two phases of a model, and a second model on other data.

    python phases.py FOLDER [KILLED] [LABELS]

KILLED: name of a process, such as worker-1, that kills itself once, in the second phase. LABELS: a
number that is added to the labels.

Every process that trains appends lines `FIT EPOCH BATCH` to FOLDER/batches-NAME, and prints a hash
of both models' weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
killed = sys.argv[2] if len(sys.argv) > 2 else ""
added = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
strategy = kd.init()  # a parameter server and its workers stay here
task = json.loads(os.environ["TF_CONFIG"])["task"]
name = f"{task['type']}-{task['index']}"

X = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")


class Note(keras.callbacks.Callback):
    """Records the batches, and kills this process once."""

    fit, epoch = 0, 0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def on_train_begin(self, logs: Any = None) -> None:
        self.fit += 1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        with (folder / f"batches-{name}").open("a") as file:
            print(self.fit, self.epoch, batch, file=file)
        # The save after batch 0 is complete, because the one after batch 1 has waited for it.
        if name == killed and (self.fit, self.epoch, batch) == (2, 1, 2):
            try:
                (folder / "killed").touch(exist_ok=False)
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)


def build() -> keras.Model:
    keras.utils.set_random_seed(2)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dropout(0.2)]
        )
        model.add(keras.layers.Dense(1))
        model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def fit(model: keras.Model, x: np.ndarray, y: np.ndarray, epochs: int) -> None:
    options = {"epochs": epochs, "verbose": 0, "callbacks": callbacks}
    if name.startswith("chief"):  # of parameter servers
        model.fit(kd.resumable(x, y, batch_size=8), **options)
    else:
        model.fit(x, y, batch_size=8, **options)


def hash_of(model: keras.Model) -> str:
    return hashlib.sha256(b"".join(each.tobytes() for each in model.get_weights())).hexdigest()


callbacks = [Note(), *kd.defaults(folder / "runs", save_freq=1, on_busy="wait")]
y = X.sum(1, keepdims=True) + added
first = build()
fit(first, X, y, 2)
first.optimizer.learning_rate = 1e-4
fit(first, X, y, 2)
second = build()
fit(second, X[::2], -y[::2], 1)
rate = float(keras.ops.convert_to_numpy(first.optimizer.learning_rate))
print("rate", f"{rate:.6g}", flush=True)
print("weights", hash_of(first), hash_of(second), flush=True)
