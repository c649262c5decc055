"""Trains, with the faults in FOLDER/faults.json.

    python faulty.py FOLDER WAY

WAY: distributed_fit, plain_fit, in_epoch or plain_in_epoch for the same with a checkpoint after
every batch, or local_tier for a distributed_fit with only local checkpoints, at the end of every
epoch. An epoch has 3 batches. KERAS_DISTPLUG_TEST_LATE: a worker whose data is late, in plain_fit;
Keras' TensorBoard then writes to the directory of the runs. KERAS_DISTPLUG_TEST_STORE: location of
the checkpoints, as JSON: a URL and its storage options.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

folder, way = Path(sys.argv[1]), sys.argv[2]

import keras  # noqa: E402

import keras_distplug as kd  # noqa: E402

strategy = kd.init()
tf_config = json.loads(os.environ.get("TF_CONFIG", "{}"))
worker = tf_config["task"]["index"] if tf_config else 0
own_folder = folder / f"local-{worker}"

import tensorflow as tf  # noqa: E402
from support import digits_like as case  # noqa: E402
from support.harm import Harm  # noqa: E402

EPOCHS = 4
LATE = os.environ.get("KERAS_DISTPLUG_TEST_LATE")
LATE_S = 0.3
# Their state also determines the result.
KNOWING = [
    keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True),
    keras.callbacks.ReduceLROnPlateau("accuracy", mode="max", patience=2),
]
# These write files, on the chief only.
WRITING = [
    keras.callbacks.CSVLogger(folder / "log.csv"),
    keras.callbacks.ModelCheckpoint(
        folder / "best.weights.h5", "loss", save_best_only=True, save_weights_only=True
    ),
    keras.callbacks.TensorBoard(
        folder / ("runs" if LATE else "logs"), histogram_freq=1, update_freq=1 if LATE else "epoch"
    ),
]
directory, storage_options = json.loads(
    os.environ.get("KERAS_DISTPLUG_TEST_STORE", json.dumps([str(folder / "runs"), None]))
)


def later(x, y, weight):
    """Returns the same batch, with a delay on one of the workers."""

    def wait(x):
        time.sleep(LATE_S)
        return x

    if str(worker) != LATE:
        return x, y, weight
    late = tf.numpy_function(wait, [x], x.dtype)
    late.set_shape(x.shape)
    return late, y, weight


with open(folder / f"pids-{worker}", "a") as file:
    file.write(f"{os.getpid()}\n")
x, y, sample_weight = case.arrays()
harm = Harm(folder, case.BATCHES, 1, directory, storage_options, own_folder)
each_batch = {"save_freq": 1, "on_busy": "wait", "delete_checkpoint": False}
each_epoch = {"save_freq": "epoch", "storage_options": storage_options}
if not way.startswith("plain"):
    model = case.build()
    callbacks = [*KNOWING, *WRITING, harm]
    if way == "local_tier":
        local = {"local_tier": own_folder, "local_freq": "epoch", "save_freq": "2h"}
        callbacks.append(kd.BackupAndRestore(directory, delete_checkpoint=False, **local))
    elif way == "in_epoch":
        callbacks.append(kd.BackupAndRestore(directory, **each_batch))
    else:
        callbacks += kd.defaults(directory, **each_epoch)
    history = kd.distributed_fit(
        model,
        x,
        y,
        batch_size=case.GLOBAL_BATCH,
        sample_weight=sample_weight,
        epochs=EPOCHS,
        callbacks=callbacks,
        validation_data=case.dataset(70),
        verbose=2,
    )
else:
    with strategy.scope():
        model = case.build()
    data = case.dataset().map(later) if LATE else case.dataset()
    ours = kd.defaults(directory, **each_epoch)
    if way == "plain_in_epoch":
        ours = [kd.BackupAndRestore(directory, **each_batch)]
    history = model.fit(
        data,
        epochs=EPOCHS,
        callbacks=[*ours, *KNOWING, *map(kd.chief_only, WRITING), harm],
        validation_data=case.dataset(70),
        verbose=2,
    )
case.write_outcome(
    folder / f"outcome-{worker}.npz",
    model,
    history,
    evaluated=model.evaluate(case.dataset(), verbose=0, return_dict=True),
    predicted=model.predict(case.dataset(), verbose=0),
)
