"""A job with parameter servers: the chief trains, the others serve.

    python scheduled.py FOLDER [STEPS_PER_EPOCH]

The chief writes FOLDER/batches (a line per scheduled batch, with the number of completed steps) and
FOLDER/outcome.json. Batches are slow, to leave time for faults, and training pauses mid-epoch while
FOLDER/wait exists.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# Under a supervisor, a worker or parameter server stays in the import of the package.
print(f"pid {os.getpid()}", flush=True)

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.backend.tensorflow.parameter_server import scheduled  # noqa: E402
from keras_distplug.backend.tensorflow.runtime.attached import attached  # noqa: E402

folder, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200
kd.init()  # a worker or parameter server stays here
started_s = time.monotonic()

rng = np.random.default_rng(0)
X = rng.normal(size=(640, 8)).astype("float32")
Y = (X.sum(1) > 0).astype("int32")


class Recorder(keras.callbacks.Callback):
    """Records the batches of this attempt."""

    def __init__(self) -> None:
        self.file = (folder / "batches").open("a")
        self.began: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return {}  # the state of this attempt only

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.began is None:
            self.began = steps_of(self.model)
            print(f"begins at step {self.began}", file=self.file, flush=True)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        print(batch, file=self.file, flush=True)
        time.sleep(0.01)
        while batch == steps // 2 and (folder / "wait").exists():
            time.sleep(0.05)


def steps_of(model: keras.Model) -> int:
    return int(keras.ops.convert_to_numpy(model.optimizer.iterations))


def build() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.layers.Input((8,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(2)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


recorder = Recorder()
backup = kd.BackupAndRestore(folder / "run", save_freq=50, delete_checkpoint=False, on_busy="wait")
data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(640).batch(32)
history = kd.distributed_fit(
    build,
    data,
    epochs=2,
    steps_per_epoch=steps,
    verbose=0,
    callbacks=[*kd.defaults(folder / "run")[1:], backup, recorder],
)
model = history.model
accuracy = next(metric for metric in model.metrics[1].metrics)
outcome = {
    "began": recorder.began,
    "steps": steps_of(model),
    "samples": float(keras.ops.convert_to_numpy(accuracy.count)),
    "readers": attached(model, scheduled.Schedule)._starts.numpy().tolist(),
    "evaluate": model.evaluate(X, Y, verbose=0),
    "accuracy": history.history["accuracy"],
    "secs": time.monotonic() - started_s,
}
(folder / "outcome.json").write_text(json.dumps(outcome))
