"""A shared encoder: an autoencoder is trained, then a classifier of pairs on its encoder"""

import sys
from pathlib import Path

import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
left, right = (rng.random((64, 6), "float32") for _ in range(2))
is_same = rng.integers(0, 2, (64, 1))
encoder = keras.Sequential(
    [keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)], name="encoder"
)
decoder = keras.Sequential([keras.Input((3,)), keras.layers.Dense(6)], name="decoder")
inputs = keras.Input((6,))
autoencoder = keras.Model(inputs, decoder(encoder(inputs)))
autoencoder.compile("adam", "mse")
autoencoder.fit(
    left,
    left,
    batch_size=8,
    epochs=1,
    verbose=0,
    callbacks=kd.defaults(folder / "autoencoder", save_freq=4),
)

pair = [keras.Input((6,), name="left"), keras.Input((6,), name="right")]
difference = keras.ops.abs(encoder(pair[0]) - encoder(pair[1]))
model = keras.Model(pair, keras.layers.Dense(1, activation="sigmoid")(difference))
model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
history = model.fit(
    [left, right],
    is_same,
    batch_size=8,
    epochs=3,
    verbose=0,
    callbacks=kd.defaults(folder / "classifier", save_freq=4),
)
