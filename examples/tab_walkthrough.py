"""A tour of TensorBoard's tab "Distplug", with the figures of a small run in which things go wrong.

    python examples/tab_walkthrough.py              # writes report.html, the same page as a file
    python examples/tab_walkthrough.py --serve      # starts TensorBoard at the end

Or run it cell by cell, in an editor that supports cells (VS Code, PyCharm, Spyder). If the folder
runs/tab_walkthrough does not exist, the run is created first, which takes up to a minute.
"""

# %% [markdown]
# ## A run in which things go wrong
#
# Two replicas learn to read handwritten digits. One of them is slow, loading data is slow, a
# picture is damaged, and the process is killed once. The training runs in a separate process,
# which `keras-distplug run` starts and restarts.

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
DISK_S, BUSY_S = 0.01, 0.05  # per batch: the delays of the data and of the slow replica


def train(directory: Path) -> None:
    import digits
    import keras
    import numpy as np
    import tensorflow as tf

    import keras_distplug as kd

    class SlowDisk(keras.utils.PyDataset):
        """The batches of the training data, in order."""

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
        """Returns its input unchanged; late on replica 1, like a device that is also used by other
        processes."""

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
        """Kills its own process with `kill -9`, once."""

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            killed = directory / "killed"
            if (self.epoch, batch) == (KILL_AT_EPOCH, KILL_AT_BATCH) and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    # Split the CPU into two replicas. Not needed with several GPUs.
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    keras.utils.set_random_seed(7)
    (x_train, y_train), (x_test, y_test) = digits.load()
    x_train, y_train = x_train[:1500], y_train[:1500]  # in case it is MNIST
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
# The tab shows the log that `kd.defaults()` writes alongside the checkpoints; the command
# `keras-distplug goodput` reads the same log. It consists of lines of JSON that you can also read
# with your own code.


# %%
def told_by(*command: str) -> Any:
    done = subprocess.run([*keras_distplug, *command], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


run = told_by("goodput", str(DIRECTORY), "--json")["runs"][-1]
log = [
    json.loads(line)
    for file in sorted((DIRECTORY / run["name"] / "log").glob("*.jsonl"))
    for line in file.read_text().splitlines(keepends=True)
    if line.endswith("\n")  # a killed process may leave an incomplete last line
]

# %% [markdown]
# ## Headline
#
# Goodput is the share of the total time in which the model received new updates. For a run of a
# minute it is low, because most of the time is the start of processes. Steps count batches.

# %%
print(f"\n{run['name']}: goodput {100 * run['goodput']:.1f} % of {run['wall_secs']:.1f} s")
print(f"  step {run['step']}, {len(run['attempts'])} attempts")

# %% [markdown]
# ## Where the time went
#
# Every second belongs to one of ten categories. Here, `start_up` occurs twice, because of the kill.
# `input` is the time that steps wait for the slow disk, `redone` the time of batches that were
# trained twice or not applied because of the damaged picture, and `recovery` the time between a
# death and the next start. `sync` is the time that all replicas of the chief wait for other
# workers: next to nothing here, because the slow replica is its own. The time of that replica
# counts as `step`, and is shown below.

# %%
print("\nWhere the time went")
for category, secs in sorted(run["secs"].items(), key=lambda each: -each[1]):
    print(f"  {category:<10} {secs:6.1f} s  {100 * secs / run['wall_secs']:5.1f} %")

# %% [markdown]
# ## Attempts
#
# One bar for every start of the training, with the reason why it ended. Lost steps are those after
# the last checkpoint, which the next attempt trained again. For a killed process, they are known up
# to the last line of its log, which is written once a second.

# %%
print("\nAttempts")
for attempt in run["attempts"]:
    steps = f"steps {attempt['first_step']} to {attempt['last_step']}"
    print(f"  {attempt['number']}: {steps}, {attempt['lost_steps']} lost; {attempt['end']}")

# %% [markdown]
# ## Replicas over time, and Stragglers
#
# The heat map has a row for every replica: dark is fast, bright is slow. A row that is bright
# throughout is a slow replica; a bright column is a slowdown of all replicas. The table below it
# shows the replicas that are slow now. `StragglerWatchdog` reports a replica that was slow for
# forty consecutive steps.

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
# The duration of every save, and the time that training was blocked by it: two different times,
# because files are written in the background. The newest two are kept.

# %%
print("\nCheckpoints")
saves = [line for line in log if line["event"] == "saved"]
for line in saves:
    took, stood_still = 1000 * line["secs"], 1000 * line["stall_secs"]
    print(
        f"  step {line['step']}: took {took:.0f} ms; training was blocked for {stood_still:.1f} ms"
    )

# %% [markdown]
# ## Incidents
#
# Everything that went wrong: skipped updates, stragglers, failed saves, hangs, lost workers. The
# batch with the damaged picture occurs once per epoch; its update is not applied on any replica. It
# is saved in runs/tab_walkthrough/incidents, as a safetensors file.

# %%
INCIDENTS = ("update_left_out", "slow_replica", "failed")
print("\nIncidents")
for line in sorted(log, key=lambda line: line["at"]):
    if line["event"] in INCIDENTS:
        print(f"  {line['event'].replace('_', ' ')}: {line['what']}")

# %% [markdown]
# ## Explore
#
# The file contains the whole page and makes no requests, so you can send it to others.

# %%
report = DIRECTORY / "report.html"
command = ["report", str(DIRECTORY), "-o", str(report), "--overwrite"]
subprocess.run([*keras_distplug, *command], check=True)

if "--serve" in sys.argv:
    print(
        "\nOpen the address that TensorBoard prints, and select the tab Distplug. Ctrl-C stops it."
    )
    sys.stdout.flush()
    tensorboard = [sys.executable, "-m", "tensorboard.main", "--logdir", str(RUNS), "--port", "0"]
    try:
        subprocess.run(tensorboard)
    except KeyboardInterrupt:
        print("stopped")
else:
    print(f"\nOpen {report} in a browser; or: tensorboard --logdir {RUNS}")
