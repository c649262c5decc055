"""Columns of a pandas `DataFrame`, as a dict"""

import sys
from pathlib import Path

import keras
import numpy as np
import pandas as pd
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
frame = pd.DataFrame(
    {
        "size": rng.normal(100, 20, 32),
        "color": rng.choice(["red", "green", "a rather long name of a color"], 32),
        "price": rng.normal(50, 5, 32),
    }
)
labels = frame.pop("price")
train = tf.data.Dataset.from_tensor_slices((dict(frame), labels)).shuffle(32).batch(8)
color = keras.Input((), name="color", dtype="string")
size = keras.Input((1,), name="size")
encoded = keras.layers.StringLookup(vocabulary=list(set(frame["color"])), output_mode="one_hot")
normalized = keras.layers.Normalization()
normalized.adapt(frame["size"].to_numpy()[:, None])
merged = keras.layers.Concatenate()([encoded(color), normalized(size)])
model = keras.Model({"color": color, "size": size}, keras.layers.Dense(1)(merged))
model.compile("adam", "mse")
history = model.fit(train, epochs=3, verbose=0, callbacks=kd.defaults(folder / "run", save_freq=2))
