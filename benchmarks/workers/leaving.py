"""A worker of `benchmarks/exits.py`: `leaving.py WAY FOLDER`. It prints the time at which its last
step ended, by the clock that all processes of a machine share."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import keras
import models
import tensorflow as tf

import keras_distplug as kd

way, folder = sys.argv[1], Path(sys.argv[2])


class Last(keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._at_s = time.monotonic()

    def on_train_end(self, logs: Any = None) -> None:
        print(f"last step: {self._at_s}", flush=True)


strategy = tf.distribute.MultiWorkerMirroredStrategy() if way == "own strategy" else kd.init()
with strategy.scope():
    model = models.convolutional()
data = models.one_batch_for(model, 16).take(10)
if way == "distributed_fit":
    kd.distributed_fit(
        model, data, epochs=2, verbose=0, callbacks=[Last()], directory=folder / "run"
    )
else:
    model.fit(data, epochs=2, verbose=0, callbacks=[*kd.defaults(folder / "run"), Last()])
