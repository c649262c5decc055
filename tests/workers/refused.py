"""Trains with an invalid argument.

    python refused.py FOLDER WHERE [WORKER]

WHERE: `init`, `defaults` or `fit`, for an argument of these; `callback`, for an error that WORKER
finds after a batch, while the others compute the next one. Every start is recorded in
FOLDER/started.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

folder, where, workers = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
tf_config = json.loads(os.environ.get("TF_CONFIG", "{}"))
worker = tf_config["task"]["index"] if tf_config else 0
with open(folder / "started", "a") as file:
    file.write(f"{worker}\n")

import keras  # noqa: E402

import keras_distplug as kd  # noqa: E402

strategy = kd.init("nonsense" if where == "init" else "auto")

from support import digits_like as case  # noqa: E402


class Refuse(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and str(worker) in workers:
            raise kd.errors.ConfigurationError(f"This cannot be, says {worker}")


callbacks = [Refuse()]
if where == "defaults":
    callbacks += kd.defaults(folder / "runs", save_freq="nonsense")
kd.distributed_fit(
    case.build(),
    *case.arrays()[:2],
    batch_size=case.GLOBAL_BATCH,
    validation_split=2.0 if where == "fit" else 0.0,
    epochs=2,
    callbacks=callbacks,
    directory=folder / "runs",
    verbose=0,
)
