"""A substitute for examples/train.py in examples/slurm/train.sbatch.

Its steps are slow while the working directory contains the file `hold`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path

import keras

import keras_distplug as kd

parser = argparse.ArgumentParser()
parser.add_argument("--directory", required=True)
parser.add_argument("--grace-secs", type=float, required=True)
parser.add_argument("--requeue", action="store_true")
given = parser.parse_args()

strategy = kd.init()

from support import digits_like as case  # noqa: E402


class Hold(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        start = os.environ.get("SLURM_RESTART_COUNT", "0")
        Path(f"{os.path.basename(given.directory)}-training-{start}").touch()
        if Path("hold").exists():
            time.sleep(2)


preemption = kd.PreemptionHandler(grace_secs=given.grace_secs, cloud=False, requeue=given.requeue)
model = kd.distributed_fit(
    case.build,
    lambda: case.dataset().repeat(30),
    epochs=3,
    verbose=0,
    callbacks=[Hold(), preemption],
    directory=given.directory,
    save_freq="5s",
).model
digest = hashlib.sha256()
for variable in [*model.variables, *model.optimizer.variables]:
    digest.update(variable.numpy().tobytes())
print(f"{os.path.basename(given.directory)}: sha256 {digest.hexdigest()}", flush=True)
