"""What TensorBoard's tab "Distplug" shows, with the figures of a small run that has gone wrong.

    python examples/tab_walkthrough.py              # writes report.html, the same page as a file
    python examples/tab_walkthrough.py --serve      # starts TensorBoard in the end

Or cell by cell, in an editor that knows them (VS Code, PyCharm, Spyder). The run is made when the
folder runs/tab_walkthrough is not there yet, within a minute.
"""

# %% [markdown]
# ## A run in which things go wrong
#
# Two replicas learn to read handwritten digits. One of them is slow, the data come slowly, a
# picture is damaged, and the process is killed once. The training runs in a process of its own,
# which `keras-distplug run` starts, and starts again.

# %%
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RUNS = Path("runs")
DIRECTORY = RUNS / "tab_walkthrough"
EPOCHS, BATCH = 5, 64
KILL_AT_EPOCH, KILL_AT_BATCH = 2, 21  # counted from 0
DAMAGED = 100  # the number of a picture
DISK_S, BUSY_S = 0.01, 0.05  # for each batch: how slow the data are, and the replica


def train(directory: Path) -> None:
    import digits
    import keras
    import numpy as np
    import tensorflow as tf

    import keras_distplug as kd

    class SlowDisk(keras.utils.PyDataset):
        """Batches of the training data, in their order."""

        def __init__(self, x, y):
            super().__init__()
            self.x, self.y = x, y

        def __len__(self):
            return len(self.x) // BATCH

        def __getitem__(self, index):
            time.sleep(DISK_S)
            rows = slice(BATCH * index, BATCH * (index + 1))
            return self.x[rows], self.y[rows]

    class Busy(keras.layers.Layer):
        """Gives what it is given; late on replica 1, as a device that others use, too."""

        def call(self, x):
            context = tf.distribute.get_replica_context()
            if context is None or isinstance(x, keras.KerasTensor):
                return x

            def late(values, replica):
                time.sleep(BUSY_S if replica == 1 else 0)
                return values

            given = [x, context.replica_id_in_sync_group]
            later = tf.numpy_function(late, given, x.dtype, stateful=False)
            later.set_shape(x.shape)
            return later

    class KillOnce(keras.callbacks.Callback):
        """`kill -9`, no goodbye, once."""

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            killed = directory / "killed"
            if (self.epoch, batch) == (KILL_AT_EPOCH, KILL_AT_BATCH) and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    # Two replicas of one CPU. With several GPUs these are there already.
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    keras.utils.set_random_seed(7)
    (x_train, y_train), (x_test, y_test) = digits.load()
    x_train, y_train = x_train[:1500], y_train[:1500]  # of MNIST, if that is there
    x_train[DAMAGED] = np.nan

    def build() -> keras.Model:
        model = keras.Sequential(
            [
                keras.Input(x_train.shape[1:]),
                Busy(),
                keras.layers.Conv2D(16, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            optimizer=keras.optimizers.Adam(0.005),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        return model

    kd.distributed_fit(
        build,
        SlowDisk(x_train, y_train),
        epochs=EPOCHS,
        validation_data=(x_test[:300], y_test[:300]),
        shuffle=False,
        strategy="mirrored",
        callbacks=[*kd.defaults(directory), KillOnce()],
        verbose=2,
    )


if "--train" in sys.argv:
    train(DIRECTORY)
    sys.exit()

# %%
keras_distplug = [sys.executable, "-m", "keras_distplug"]  # the command `keras-distplug`

if not DIRECTORY.exists():
    script = [sys.executable, __file__, "--train"]
    subprocess.run([*keras_distplug, "run", "--workers", "1", "--", *script], check=True)

# %% [markdown]
# ## The figures
#
# What the tab shows comes from the log that `kd.defaults()` keeps beside the checkpoints, and the
# command `keras-distplug goodput` reads the same. The log is lines of JSON: read it yourself.


# %%
def told_by(*command: str) -> Any:
    done = subprocess.run([*keras_distplug, *command], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


run = told_by("goodput", str(DIRECTORY), "--json")["runs"][-1]
log = [
    json.loads(line)
    for file in sorted((DIRECTORY / run["name"] / "log").glob("*.jsonl"))
    for line in file.read_text().splitlines(keepends=True)
    if line.endswith("\n")  # the last one of a process that was killed may be cut off
]

# %% [markdown]
# ## Headline
#
# Goodput is the share of all time in which the model was given updates, each for the first time.
# That of a minute is low: most of it is the start of processes. The step counts batches.

# %%
print(f"\n{run['name']}: goodput {100 * run['goodput']:.1f} % of {run['wall_secs']:.1f} s")
print(f"  step {run['step']}, {len(run['attempts'])} attempts")

# %% [markdown]
# ## Where the time went
#
# Each second belongs to one of ten categories. Here, `start_up` comes twice, because of the kill.
# `input` is what steps wait for the slow disk, `redone` what was trained twice, or was not applied
# for the damaged picture, and `recovery` goes by between a death and the next start. `sync` is what
# all replicas of the chief wait for others: next to nothing here, since the slow one is its own.
# What that one takes counts as `step`, and is seen below.

# %%
print("\nWhere the time went")
for category, secs in sorted(run["secs"].items(), key=lambda each: -each[1]):
    print(f"  {category:<10} {secs:6.1f} s  {100 * secs / run['wall_secs']:5.1f} %")

# %% [markdown]
# ## Attempts
#
# One bar for each start of the training, with what ended it. Lost steps are those that the next
# one had to train again, for they came behind the last checkpoint. Of a process that was killed the
# log knows the steps up to its last line, of which there is one a second.

# %%
print("\nAttempts")
for attempt in run["attempts"]:
    steps = f"steps {attempt['first_step']} to {attempt['last_step']}"
    print(f"  {attempt['number']}: {steps}, {attempt['lost_steps']} lost; {attempt['end']}")

# %% [markdown]
# ## Replicas over time, and Stragglers
#
# The picture has a row for each replica: dark is fast, bright is slow. A row that is bright
# throughout is a slow replica, a bright column something that all have met. The table below it has
# who is slow now. `StragglerWatchdog` tells of one that was slow in forty steps in a row.

# %%
times: dict[int, list[float]] = {}
for line in log:
    for replica in line["replicas"] if line["event"] == "window" else []:
        times.setdefault(replica["replica"], []).append(1000 * replica["compute_s"])
print("\nReplicas over time")
for number, of_replica in sorted(times.items()):
    middle = sorted(of_replica)[len(of_replica) // 2]
    print(f"  replica {number}: {middle:.0f} ms to compute its part of a batch")
print("Stragglers")
for line in log:
    if line["event"] == "slow_replica":
        print(f"  {line['what']}")

# %% [markdown]
# ## Checkpoints
#
# What each took, and how long training stood still for it: two different times, since files are
# written in the background. The newest two are kept.

# %%
print("\nCheckpoints")
saves = [line for line in log if line["event"] == "saved"]
for line in saves:
    took, stood_still = 1000 * line["secs"], 1000 * line["stall_secs"]
    print(f"  step {line['step']}: took {took:.0f} ms; training stood still {stood_still:.1f} ms")

# %% [markdown]
# ## Incidents
#
# All that has gone wrong: updates left out, stragglers, failed saves, hangs, workers that were
# lost. The batch with the damaged picture comes once an epoch; its update is applied on no replica.
# It is kept in runs/tab_walkthrough/incidents, as a safetensors file.

# %%
INCIDENTS = ("update_left_out", "slow_replica", "failed")
print("\nIncidents")
for line in sorted(log, key=lambda line: line["at"]):
    if line["event"] in INCIDENTS:
        print(f"  {line['event'].replace('_', ' ')}: {line['what']}")

# %% [markdown]
# ## Look for yourself
#
# The file holds the whole page, without a request to anywhere: send it to somebody.

# %%
report = DIRECTORY / "report.html"
command = ["report", str(DIRECTORY), "-o", str(report), "--overwrite"]
subprocess.run([*keras_distplug, *command], check=True)

if "--serve" in sys.argv:
    print("\nOpen the address that TensorBoard prints, and there the tab Distplug. Ctrl-C ends it.")
    sys.stdout.flush()
    tensorboard = [sys.executable, "-m", "tensorboard.main", "--logdir", str(RUNS), "--port", "0"]
    try:
        subprocess.run(tensorboard)
    except KeyboardInterrupt:
        print("ended")
else:
    print(f"\nOpen {report} in a browser; or: tensorboard --logdir {RUNS}")
