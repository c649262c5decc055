"""Trains until a worker is lost (FOLDER/faults.json), and reports the exit.

    python lost.py FOLDER WAY [save | wait | catch]...

WAY: use of the package: `own` (a strategy of the script, callbacks in the call of `fit`), `init`
(`kd.init()`, and `fit`), `distributed` (`kd.init()`, and `distributed_fit`) or `late` (only
`distributed_fit`).

An epoch has 3 batches. save: a checkpoint after every batch, for which the workers wait for each
other. wait: after the step of the fault, all workers are in a function of the script until
TensorFlow has noticed. catch: the error is caught, and the exit code is 7. A fault at the end
occurs before `evaluate` and `predict`. A `cut` waits for FOLDER/cut: the test then cuts the link.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

folder, way, options = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

import keras_distplug as kd  # noqa: E402

by_environment = "KERAS_DISTPLUG_HEARTBEAT_TIMEOUT" in os.environ
if way in ("init", "distributed"):
    kd.init(heartbeat_timeout_secs=None if by_environment else 3.0)
strategy = tf.distribute.MultiWorkerMirroredStrategy() if way != "late" else None

from support import digits_like as case  # noqa: E402
from support import fault  # noqa: E402
from support.harm import Harm  # noqa: E402

from keras_distplug.backend.tensorflow.runtime.context import ServiceKeyValues  # noqa: E402


def await_fired() -> None:
    while not fault.fired(folder):
        time.sleep(0.05)


def await_cut() -> None:
    end = time.monotonic() + 30
    while not (folder / "cut").exists():
        assert time.monotonic() < end, "the link has not been cut"
        time.sleep(0.01)


class Wait(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        [death] = harm.faults
        if harm.epoch * case.BATCHES + batch == death.at_step:
            await_fired()
            time.sleep(5)  # until TensorFlow has noticed


harm = Harm(folder, case.BATCHES, 1, folder / "runs", own={"cut": await_cut})
saves = {"save_freq": 1 if "save" in options else "epoch", "on_busy": "wait"}
given = {"epochs": 4, "validation_data": case.dataset(70), "verbose": 0}
own = [harm, Wait()] if "wait" in options else [harm]
try:
    if way in ("own", "init"):
        with strategy.scope():
            model = case.build()
        model.fit(case.dataset(), callbacks=[*own, *kd.defaults(folder / "runs", **saves)], **given)
    else:
        saves["directory"] = folder / "runs"
        callbacks = [*own, *kd.defaults(**saves)]
        model = kd.distributed_fit(case.build, case.dataset, callbacks=callbacks, **given).model
    harm.on_fit_end()
    for _ in range(50):
        model.evaluate(case.dataset(), verbose=0)
        model.predict(case.dataset(), verbose=0)
except kd.errors.PeerLostError as error:
    [death] = fault.fired(folder)
    print(f"heartbeat: {ServiceKeyValues().heartbeat_timeout_s} s")
    print(f"after {time.time() - death.at:.1f} s")
    if "catch" not in options:
        raise
    print(f"caught: {error}")
    sys.exit(7)
