"""Trains, saving in every epoch, on a store with the faults in FOLDER/faults.json.

    python saving.py FOLDER [export]

An epoch has 3 batches. Writing a file is not retried. export: at the start of the fourth epoch,
exports files of every format to FOLDER/exported, and writes the model's current weights to
FOLDER/then.npz.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

folder, options = Path(sys.argv[1]), sys.argv[2:]

import keras  # noqa: E402
import numpy as np  # noqa: E402
import stamina  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.core.errors import SaveError  # noqa: E402

strategy = kd.init()

from support import digits_like as case  # noqa: E402
from support.harm import Harm  # noqa: E402
from support.where import own_name  # noqa: E402

EPOCHS = 12
stamina.set_testing(True, attempts=1)


class Begins(keras.callbacks.Callback):  # type: ignore[misc]
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        print(f"epoch {epoch}", flush=True)
        if "export" in options and epoch == 3:
            for ending in ("keras", "weights.h5", "safetensors"):
                backup.export(folder / "exported" / f"model.{ending}")
            variables = [*self.model.weights, *self.model.optimizer.variables]
            arrays = {f"{i:03d}": np.asarray(v.value) for i, v in enumerate(variables)}
            if own_name() == "worker-0":
                np.savez(folder / "then.npz", **arrays)


x, y, sample_weight = case.arrays()
model = case.build()
harm = Harm(folder, case.BATCHES, 1, folder / "runs")
backup = kd.BackupAndRestore(folder / "runs", on_busy="wait", keep_last=1)
try:
    history = kd.distributed_fit(
        model,
        x,
        y,
        batch_size=case.GLOBAL_BATCH,
        sample_weight=sample_weight,
        epochs=EPOCHS,
        callbacks=[harm, Begins(), backup],
        verbose=0,
    )
except SaveError as error:
    print(f"SaveError: {error}", flush=True)
    sys.exit(7)
arrays = {f"{i:03d}": np.asarray(v.value) for i, v in enumerate(model.variables)}
arrays |= {f"o{i:03d}": np.asarray(v.value) for i, v in enumerate(model.optimizer.variables)}
arrays |= {f"h {name}": np.asarray(values) for name, values in history.history.items()}
np.savez(folder / f"outcome-{own_name()}.npz", **arrays)
