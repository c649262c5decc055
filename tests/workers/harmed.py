"""Trains with all watchdogs, under the faults of a job.

    python harmed.py FOLDER

FOLDER/job.json has the parameters (`support/harmed.py`). Every process that trains finally writes
FOLDER/outcome-WORKER.npz.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from support.where import own_name, sign_in

folder = Path(sys.argv[1])
sign_in(folder)  # a serving process stays in the first import of the package

from support.harmed import Job  # noqa: E402

job = Job.read(folder)

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import keras_distplug as kd  # noqa: E402

if job.set_up.replicas > 1:
    cpu = tf.config.list_physical_devices("CPU")[0]
    each = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [each] * job.set_up.replicas)
strategy = kd.init("mirrored" if job.set_up.replicas > 1 else "auto")

from support.harm import Harm  # noqa: E402

STEP_SECS, SAVE_SECS = 10, 15  # of which a busy machine causes some


class Batches(keras.utils.PyDataset):
    """Noise as a dataset."""

    def __len__(self):
        return job.batches

    def __getitem__(self, number):
        rows = slice(number * job.global_batch, (number + 1) * job.global_batch)
        return harm.on_input(number, (X[rows], Y[rows], WEIGHT[rows]))


def at_servers() -> tf.data.Dataset:
    """The same for workers of a job with parameter servers, which cannot run Python."""
    whole = tf.data.Dataset.from_tensor_slices((X, Y, WEIGHT))
    return whole.batch(job.global_batch).repeat()


class Enough(keras.callbacks.Callback):
    """Ends training on all workers after the same epoch, some time after FOLDER/enough appears.

    It is not the current epoch or the next one, which some workers may have started.
    """

    def on_epoch_end(self, epoch, logs=None):
        last = folder / "last_epoch"
        if own_name() == "worker-0" and (folder / "enough").exists() and not last.exists():
            (folder / "last_epoch.tmp").write_text(str(epoch + 3))
            os.replace(folder / "last_epoch.tmp", last)
        if last.exists() and epoch >= int(last.read_text()):
            self.model.stop_training = True


def build() -> keras.Model:
    keras.utils.set_random_seed(21)
    made = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3, use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3, seed=6),
            keras.layers.Dense(5),
        ]
    )
    made.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        weighted_metrics=["accuracy"],
    )
    return made


rng = np.random.default_rng(8)
samples = job.batches * job.global_batch
X = rng.normal(size=(samples, 8, 8, 1)).astype("float32")
Y = rng.integers(0, 5, samples).astype("float32")
WEIGHT = rng.random(samples).astype("float32")
VALIDATION = (X[: job.global_batch], Y[: job.global_batch])

harm = Harm(folder, job.batches, job.set_up.replicas, job.directory, job.storage_options)
early = keras.callbacks.EarlyStopping("loss", patience=10_000, restore_best_weights=True)
history = kd.distributed_fit(
    build,
    at_servers() if job.set_up.servers else Batches(),
    shuffle=False,  # a batch's number is its position
    steps_per_epoch=job.batches if job.set_up.servers else None,
    epochs=job.epochs,
    validation_data=VALIDATION,
    callbacks=[
        early,
        keras.callbacks.ReduceLROnPlateau("loss", patience=3, min_lr=1e-4),
        keras.callbacks.CSVLogger(folder / "log.csv"),
        *kd.defaults(job.directory)[1:],
        kd.BackupAndRestore(
            job.directory,
            save_freq=job.save_freq,
            storage_options=job.storage_options,
            delete_checkpoint=False,
            on_busy="wait",
        ),
        kd.HangWatchdog(step_secs=STEP_SECS, save_secs=SAVE_SECS),
        harm,
        Enough(),
    ],
    verbose=0,
    strategy=strategy,
)
model = history.model
state = {f"variable/{i:03}": v.numpy() for i, v in enumerate(model.weights)}
state |= {f"optimizer/{i:03}": v.numpy() for i, v in enumerate(model.optimizer.variables)}
state |= {f"history/{name}": np.array(values) for name, values in history.history.items()}
state |= {
    f"early/{name}": np.array(getattr(early, name)) for name in ("wait", "best", "best_epoch")
}
state["iterations"] = np.array(model.optimizer.iterations)
state["csv"] = np.array((folder / "log.csv").read_text())
state["epochs"] = np.array(history.epoch)
np.savez(folder / f"outcome-{own_name()}.npz", **state)
harm.on_fit_end()
