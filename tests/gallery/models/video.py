"""Next frames of a video: `ConvLSTM2D`, `ReduceLROnPlateau` and `EarlyStopping`"""

import sys
from pathlib import Path

import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)
frames = np.random.default_rng(0).random((80, 5, 8, 8, 1), "float32")
x, y = frames[:, :-1], frames[:, 1:]
inputs = keras.Input((None, 8, 8, 1))
h = keras.layers.ConvLSTM2D(4, 3, padding="same", return_sequences=True, activation="relu")(inputs)
h = keras.layers.BatchNormalization()(h)
h = keras.layers.ConvLSTM2D(4, 1, padding="same", return_sequences=True, dropout=0.1)(h)
outputs = keras.layers.Conv3D(1, 3, activation="sigmoid", padding="same")(h)
model = keras.Model(inputs, outputs)
model.compile(loss=keras.losses.BinaryCrossentropy(), optimizer=keras.optimizers.Adam())
history = model.fit(
    x[:64],
    y[:64],
    batch_size=8,
    epochs=3,
    validation_data=(x[64:], y[64:]),
    verbose=0,
    callbacks=[
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=2, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=1, min_delta=1),
        *kd.defaults(folder / "run", save_freq=4),
    ],
)
