"""Trains with a `PreemptionHandler`, and sends itself signals where it is told to.

    python told.py FOLDER [TOLD ...]

TOLD: `attempt:worker:epoch:batch:signal`, all counted from 0, or with `saving` instead of a batch
for when the epoch's checkpoint has begun to be written; several of one worker in one place come one
after another. Each is noted in FOLDER/told before it is sent. The signals `SIGINT again` and
`SIGTERM, then SIGCONT` come when another worker has stopped itself by SIGSTOP, and are followed,
when they have been noticed, by another SIGINT, or by SIGCONT to that one. With `before:fit`
instead of an epoch and a batch, there. KERAS_DISTPLUG_TEST_NO_SIGNALS leaves signals to
TensorFlow.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

folder, told = Path(sys.argv[1]), [each.split(":") for each in sys.argv[2:]]

import keras  # noqa: E402

import keras_distplug as kd  # noqa: E402

strategy = kd.init()
tf_config = json.loads(os.environ.get("TF_CONFIG", "{}"))
worker = tf_config["task"]["index"] if tf_config else 0
attempt = os.environ.get("KERAS_DISTPLUG_ATTEMPT", "0")

from support import digits_like as case  # noqa: E402

from keras_distplug.storage import saver  # noqa: E402


def tell(epoch: object, moment: object) -> None:
    here = [attempt, str(worker), str(epoch), str(moment)]
    for *place, name in told:
        if place == here:
            with open(folder / "told", "a") as file:
                file.write(":".join([*place, name]) + "\n")
            if name == "SIGSTOP":
                (folder / "stopped").write_text(str(os.getpid()))
            if name in AFTER:
                threading.Thread(target=AFTER[name], daemon=True).start()
            else:
                os.kill(os.getpid(), signal.Signals[name])


def when(condition) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def stopped() -> int:
    """The process that has stopped itself."""
    when((folder / "stopped").exists)
    when((folder / "stopped").read_text)
    pid = int((folder / "stopped").read_text())
    when(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    return pid


def twice() -> None:
    stopped()
    for count in (1, 2):
        os.kill(os.getpid(), signal.SIGINT)
        when(lambda count=count: len(handler._received) == count)


def wake() -> None:
    pid = stopped()
    os.kill(os.getpid(), signal.SIGTERM)
    when(lambda: handler._received)
    with open(folder / "told", "a") as file:
        file.write("noticed\n")
    os.kill(pid, signal.SIGCONT)


AFTER = {"SIGINT again": twice, "SIGTERM, then SIGCONT": wake}
signals = {"signals": []} if "KERAS_DISTPLUG_TEST_NO_SIGNALS" in os.environ else {}
handler = kd.PreemptionHandler(cloud=False, **signals, requeue="SLURM_JOB_ID" in os.environ)


class Tell(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        tell(self.epoch, batch)


teller = Tell()
stock = saver.Saver.start


def start(own, *arguments):
    stock(own, *arguments)
    tell(teller.epoch, "saving")


saver.Saver.start = start
model = case.build()
x, y, sample_weight = case.arrays()
tell("before", "fit")
history = kd.distributed_fit(
    model,
    x,
    y,
    batch_size=case.GLOBAL_BATCH,
    sample_weight=sample_weight,
    epochs=5,
    callbacks=[
        keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True),
        handler,
        kd.BackupAndRestore(folder / "runs", delete_checkpoint=False),
        teller,
    ],
    verbose=2,
)
case.write_outcome(folder / f"outcome-{worker}.npz", model, history, evaluated={}, predicted=x[:0])
tell(3, "end")
