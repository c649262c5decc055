"""Trains with a `PreemptionHandler`, and is preempted according to FOLDER/faults.json.

    python preempted.py FOLDER

An epoch has 3 batches. Two special faults start when another worker has been stopped: `twice`, two
SIGINTs, the second one when the first has been noticed; and `wake`, a SIGTERM, and then, once it
has been noticed, SIGCONT to the other worker. With KERAS_DISTPLUG_TEST_NO_SIGNALS, only TensorFlow
handles signals.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

folder = Path(sys.argv[1])

import keras  # noqa: E402

import keras_distplug as kd  # noqa: E402

strategy = kd.init()

from support import digits_like as case  # noqa: E402
from support.harm import Harm  # noqa: E402
from support.where import own_name, sign_in  # noqa: E402

sign_in(folder)


def when(condition) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def stopped() -> int:
    """Returns the process that has been stopped."""
    [stop] = [each for each in harm.faults if each.kind == "stop"]
    pid = int((folder / f"pid-{stop.who}").read_text())
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
    os.kill(pid, signal.SIGCONT)


def meanwhile(what: Callable[[], None]) -> Callable[[], None]:
    """Training continues, and waits for the stopped worker."""
    return lambda: threading.Thread(target=what, daemon=True).start()


signals = {"signals": []} if "KERAS_DISTPLUG_TEST_NO_SIGNALS" in os.environ else {}
handler = kd.PreemptionHandler(cloud=False, **signals, requeue="SLURM_JOB_ID" in os.environ)
own = {"twice": meanwhile(twice), "wake": meanwhile(wake)}
harm = Harm(folder, case.BATCHES, 1, folder / "runs", own=own)
model = case.build()
x, y, sample_weight = case.arrays()
harm.on_fit_begin()
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
        harm,
    ],
    verbose=2,
)
outcome = folder / f"outcome-{own_name()}.npz"
case.write_outcome(outcome, model, history, evaluated={}, predicted=x[:0])
harm.on_fit_end()
