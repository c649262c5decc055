"""A job with parameter servers whose model has a table that is split across them.

    python split.py FOLDER EPOCHS

The chief writes FOLDER/outcome.json. Without TF_CONFIG, it is a single process without a split.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd
from keras_distplug.backend.tensorflow.runtime.embedding_tables import merge_parts

folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
kd.init()  # a worker or parameter server stays here

rng = np.random.default_rng(0)
TOKENS = rng.integers(0, 1000, size=(640, 5))
FEW = ((TOKENS % 10 < 3).sum(1) > 1).astype("float32")


def values(model: keras.Model) -> dict[str, list[float]]:
    """Returns a column of the whole table, and of all of its optimizer slots."""
    found = merge_parts([*model.variables, *model.optimizer.variables])
    return {
        each.path.replace("/", "_").rpartition("_")[2]: np.asarray(each)[:, 0].tolist()
        for each in found
        if "words" in each.path
    }


class Begins(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.values = values(self.model)
        self.steps = steps_of(self.model)


def steps_of(model: keras.Model) -> int:
    return int(keras.ops.convert_to_numpy(model.optimizer.iterations))


def build() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Input((5,), dtype="int32"),
        keras.layers.Embedding(1000, 4, name="words"),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential(layers)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    return model


begins = Begins()
model = kd.distributed_fit(
    build,
    TOKENS,
    FEW,
    batch_size=32,
    epochs=epochs,
    verbose=0,
    callbacks=[*kd.defaults(folder / "run"), begins],
    min_shard_bytes=1000,
).model
outcome = {
    "began": begins.steps,
    "begun": begins.values,
    "ended": values(model),
    "steps": steps_of(model),
    "parts": [
        (each.shape[0], tf.DeviceSpec.from_string(each.value.device).task)
        for each in model.variables
        if "words" in each.path
    ],
    "loss": model.evaluate(TOKENS, FEW, verbose=0),
}
(folder / "outcome.json").write_text(json.dumps(outcome))
