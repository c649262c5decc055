"""Runs rows of the matrix in a setup, and writes their results.

    python matrix.py SETUP FOLDER

FOLDER/names.json lists the rows. SETUP: "reference" (plain Keras, one process) or the name of a
strategy. Every row leaves `<number>-<worker>.npz`, or `.error` if it was refused or failed.
KERAS_DISTPLUG_TEST_DEVICES: number of logical CPU devices per worker.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import time
import traceback
from pathlib import Path

import numpy as np

setup, folder = sys.argv[1], Path(sys.argv[2])
names: list[list[str]] = json.loads((folder / "names.json").read_text())
devices = int(os.environ.get("KERAS_DISTPLUG_TEST_DEVICES", "1"))
ROW_TIMEOUT_S = 120
worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"] if "TF_CONFIG" in os.environ else 0

if setup == "multi_worker" and devices > 1:
    from keras_distplug.core.supervised import Supervised

    os.environ.update(Supervised("test", 0, folder, devices_per_worker=devices).to_env())

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

if setup not in ("reference", "multi_worker"):
    cpu = tf.config.list_physical_devices("CPU")[0]
    each = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [each] * devices)

import keras_distplug as kd  # noqa: E402

strategy = tf.distribute.get_strategy() if setup == "reference" else kd.init(setup)

from contracts.row import Row  # noqa: E402
from contracts.rows import ROWS  # noqa: E402
from contracts.uses import Outcome  # noqa: E402

keras.config.disable_traceback_filtering()


def run(row: Row) -> Outcome:
    with strategy.scope() if setup != "reference" else contextlib.nullcontext():
        model = row.build()
    return row.use(model if setup == "reference" else kd.adapt(model))


def write(stem: Path, row: Row, replicas: int) -> None:
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    keras.config.set_dtype_policy(row.policy)
    faulthandler.dump_traceback_later(ROW_TIMEOUT_S, exit=True)
    try:
        found = row.reference(row, replicas) if setup == "reference" and row.reference else run(row)
    except Exception as error:  # noqa: BLE001 (any error is the outcome of this row)
        stem.with_suffix(".error").write_text(f"{type(error).__name__}: {error}")
        traceback.print_exc()
    else:
        np.savez(stem.with_suffix(".npz"), **found)
    finally:
        faulthandler.cancel_dump_traceback_later()


start = time.monotonic()
for number, (family, name) in enumerate(names):
    row = ROWS[family][name]
    print(f"{time.monotonic() - start:.1f} s: {family}: {name}", flush=True)
    if setup != "reference":
        write(folder / f"{number}-{worker}", row, strategy.num_replicas_in_sync)
    elif row.reference is None:
        write(folder / f"{number}-any", row, 1)
    else:
        for replicas in json.loads(os.environ["KERAS_DISTPLUG_TEST_REPLICAS"]):
            write(folder / f"{number}-{replicas}", row, replicas)
