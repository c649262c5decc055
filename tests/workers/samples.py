"""Trains, and records the samples of every replica and step; may be killed.

    python samples.py FOLDER DATA [WORKER:EPOCH:BATCH ...]

DATA: arrays, tf.data or PyDataset. After that batch, counted from 0, the worker is killed by
SIGKILL, or by the global `end`; FOLDER/kills lists the kills. Every kill ends an attempt. A line of
FOLDER/samples-<attempt>-<worker> is a replica's part of a step: the step, the replica, and the
samples.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from pathlib import Path

folder, kind, kill = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
end = globals().get("end", lambda: os.kill(os.getpid(), signal.SIGKILL))

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import keras_distplug as kd  # noqa: E402

strategy = kd.init()

from keras_distplug.cluster.roles import from_environment  # noqa: E402

worker = from_environment(os.environ).rank
kills = folder / "kills"
attempt = len(kills.read_text().splitlines()) if kills.exists() else 0
samples = folder / f"samples-{attempt}-{worker}"

EPOCHS, BATCH, SAMPLES = 4, 8, 42  # the last batch has 2: with three replicas, one has none


def note(step: np.ndarray, replica: np.ndarray, ids: np.ndarray) -> None:
    with open(samples, "a") as file:
        file.write(" ".join(map(str, [step, replica, *ids])) + "\n")


@keras.saving.register_keras_serializable()
class Noting(keras.Model):
    """A model whose samples are pairs of an ID and the input."""

    def train_step(self, data):
        (ids, _), _ = data
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        tf.numpy_function(note, [self.optimizer.iterations.value, replica, ids], [])
        return super().train_step(data)


class Kill(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if [f"{worker}:{self.epoch}:{batch}"] == kill[attempt : attempt + 1]:
            with open(kills, "a") as file:
                file.write(f"{kill[attempt]}\n")
            end()


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return math.ceil(SAMPLES / BATCH)

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return (ids[rows], features[rows]), labels[rows]


def build() -> keras.Model:
    inputs = keras.Input((), dtype="int32"), keras.Input((6,))
    hidden = keras.layers.Dense(8, use_bias=False)(inputs[1])
    hidden = keras.layers.BatchNormalization(synchronized=True)(hidden)
    hidden = keras.layers.Activation("tanh")(hidden)
    made = Noting(inputs, keras.layers.Dense(3)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # XLA cannot run Python.
    made.compile("adam", loss, metrics=["accuracy"], jit_compile=False)
    return made


def data() -> dict:
    if kind == "arrays":
        return {"x": (ids, features), "y": labels, "batch_size": BATCH, "shuffle": True}
    if kind == "PyDataset":
        return {"x": Batches(), "shuffle": True}
    whole = tf.data.Dataset.from_tensor_slices(((ids, features), labels)).shuffle(30, seed=9)
    return {"x": whole.map(lambda x, y: ((x[0], 2.0 * x[1]), y), 2).batch(BATCH)}


keras.utils.set_random_seed(3)
draw = np.random.default_rng(8)
ids = np.arange(SAMPLES, dtype="int32")
features = draw.normal(size=(SAMPLES, 6)).astype("float32")
labels = draw.integers(0, 3, SAMPLES)
history = kd.distributed_fit(
    build,
    **data(),
    epochs=EPOCHS,
    callbacks=[
        Kill(),
        kd.BackupAndRestore(folder / "runs", save_freq=1, delete_checkpoint=False, on_busy="wait"),
    ],
    verbose=0,
    strategy=strategy,
)
variables = [*history.model.weights, *history.model.optimizer.variables]
state = {f"variable/{i:03}": v.numpy() for i, v in enumerate(variables)}
state |= {f"history/{name}": np.array(values) for name, values in history.history.items()}
np.savez(folder / f"outcome-{worker}.npz", **state, epochs=np.array(history.epoch))
