"""Trains, saving all the time, on a storage that does harm where it is told to.

    python saving.py FOLDER [kill CALL | fail WORKER FIRST LAST | export]

kill: SIGKILL at the CALL-th time that this process, once it trains, is about to write, fsync, link
or delete something. fail: on one worker, writing its share fails in the FIRST-th to the LAST-th
save, counted from 1; each failure is noted in FOLDER/failed. export: no harm, but files of each
format at the begin of the fourth epoch, and what the model held then in FOLDER/then.npz.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

folder, harm = Path(sys.argv[1]), sys.argv[2:]

import keras  # noqa: E402
import numpy as np  # noqa: E402
import stamina  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.core.errors import SaveError  # noqa: E402
from keras_distplug.storage.files import LocalFiles  # noqa: E402

kd.init()
tf_config = json.loads(os.environ.get("TF_CONFIG", "{}"))
worker = tf_config["task"]["index"] if tf_config else 0

from support import digits_like as case  # noqa: E402

EPOCHS = 12
calls = itertools.count(1)


def killing(name: str) -> None:
    stock = getattr(os, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == int(harm[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        return stock(*args, **kwargs)

    setattr(os, name, counted)


def failing(worker_: int, first: int, last: int) -> None:
    stock, saves = LocalFiles.create, itertools.count(1)

    def create(self: LocalFiles, path: str, parts: Any) -> None:
        if worker == worker_ and path.endswith(".safetensors") and first <= next(saves) <= last:
            with open(folder / "failed", "a") as file:
                file.write(f"{worker}\n")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        stock(self, path, parts)

    LocalFiles.create = create  # type: ignore[method-assign]
    stamina.set_testing(True, attempts=1)


class Begins(keras.callbacks.Callback):  # type: ignore[misc]
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        print(f"epoch {epoch}", flush=True)
        if harm == ["export"] and epoch == 3:
            for ending in ("keras", "weights.h5", "safetensors"):
                backup.export(folder / f"model.{ending}")
            variables = [*self.model.weights, *self.model.optimizer.variables]
            arrays = {f"{i:03d}": np.asarray(v.value) for i, v in enumerate(variables)}
            if worker == 0:
                np.savez(folder / "then.npz", **arrays)

    def on_train_begin(self, logs: Any = None) -> None:
        if harm[:1] == ["kill"]:
            for name in ("fsync", "link", "unlink", "rmdir", "mkdir"):
                killing(name)
        elif harm[:1] == ["fail"]:
            failing(*map(int, harm[1:]))


x, y, sample_weight = case.arrays()
model = case.build()
backup = kd.BackupAndRestore(folder / "runs", on_busy="wait", keep_last=1)
try:
    history = kd.distributed_fit(
        model,
        x,
        y,
        batch_size=case.GLOBAL_BATCH,
        sample_weight=sample_weight,
        epochs=EPOCHS,
        callbacks=[Begins(), backup],
        verbose=0,
    )
except SaveError as error:
    print(f"SaveError: {error}", flush=True)
    sys.exit(7)
arrays = {f"{i:03d}": np.asarray(v.value) for i, v in enumerate(model.variables)}
arrays |= {f"o{i:03d}": np.asarray(v.value) for i, v in enumerate(model.optimizer.variables)}
arrays |= {f"h {name}": np.asarray(values) for name, values in history.history.items()}
np.savez(folder / f"outcome-{worker}.npz", **arrays)
