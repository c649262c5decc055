"""Structured data of several types, encoded by a `FeatureSpace`"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
columns = {
    "age": rng.integers(18, 90, 32),
    "income": rng.normal(3000, 800, 32).astype("float32"),
    "city": rng.choice(["Bern", "Oslo", "Turin", "Porto"], 32),
}
raw = tf.data.Dataset.from_tensor_slices((columns, rng.integers(0, 2, 32))).batch(8)
space = keras.utils.FeatureSpace(
    features={
        "age": "float_discretized",
        "income": "float_normalized",
        "city": keras.utils.FeatureSpace.string_categorical(num_oov_indices=1),
    },
    crosses=[("age", "city")],
    crossing_dim=8,
    output_mode="concat",
)
space.adapt(raw.map(lambda x, y: x))
train = raw.shuffle(4, seed=2).map(lambda x, y: (space(x), y), num_parallel_calls=2).prefetch(2)
model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(1, "sigmoid")])
model.compile("adam", "binary_crossentropy", metrics=[keras.metrics.AUC()])
history = model.fit(train, epochs=3, verbose=0, callbacks=kd.defaults(folder / "run", save_freq=2))
