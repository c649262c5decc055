"""Several outputs, with dicts of losses, weights and metrics"""

import sys
from pathlib import Path

import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x = {"title": rng.integers(0, 40, (64, 6)), "tags": rng.random((64, 5), "float32")}
y = {"priority": rng.random((64, 1), "float32"), "team": rng.integers(0, 4, (64, 1))}
title, tags = keras.Input((6,), name="title", dtype="int32"), keras.Input((5,), name="tags")
h = keras.layers.LSTM(8)(keras.layers.Embedding(40, 8)(title))
h = keras.layers.Dropout(0.2)(keras.layers.concatenate([h, tags]))
outputs = {
    "priority": keras.layers.Dense(1, name="priority")(h),
    "team": keras.layers.Dense(4, name="team")(h),
}
model = keras.Model({"title": title, "tags": tags}, outputs)
model.compile(
    optimizer=keras.optimizers.RMSprop(1e-3),
    loss={
        "priority": keras.losses.BinaryCrossentropy(from_logits=True),
        "team": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    },
    loss_weights={"priority": 1.0, "team": 0.2},
    metrics={"priority": ["mae"], "team": ["accuracy"]},
)
history = model.fit(
    x,
    y,
    epochs=3,
    batch_size=8,
    verbose=0,
    callbacks=kd.defaults(folder / "run", save_freq=4),
)
