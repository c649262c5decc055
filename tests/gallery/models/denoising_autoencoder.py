"""A denoising autoencoder: `GaussianNoise`, arrays, `TensorBoard` and `CSVLogger`"""

import sys
from pathlib import Path

import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).random((80, 8, 8, 1), "float32")
inputs = keras.Input((8, 8, 1))
h = keras.layers.GaussianNoise(0.4)(inputs)
h = keras.layers.Conv2D(4, 3, activation="relu", padding="same")(h)
h = keras.layers.MaxPooling2D(2, padding="same")(h)
h = keras.layers.Conv2DTranspose(4, 3, strides=2, activation="relu", padding="same")(h)
outputs = keras.layers.Conv2D(1, 3, activation="sigmoid", padding="same")(h)
model = keras.Model(inputs, outputs)
model.compile(optimizer="adam", loss="binary_crossentropy")
history = model.fit(
    x=x[:64],
    y=x[:64],
    epochs=3,
    batch_size=8,
    shuffle=True,
    validation_data=(x[64:], x[64:]),
    verbose=0,
    callbacks=[
        keras.callbacks.TensorBoard(folder / "logs"),
        keras.callbacks.CSVLogger(folder / "log.csv"),
        *kd.defaults(folder / "run", save_freq=4),
    ],
)
