"""A stateful LSTM, whose state a callback resets after every epoch"""

import sys
from pathlib import Path

import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)


class ResetStates(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        for layer in self.model.layers:
            if getattr(layer, "stateful", False):
                layer.reset_states()


series = np.random.default_rng(0).normal(size=(8, 8 * 5 + 1, 1)).cumsum(1).astype("float32")
x = np.concatenate([series[:, n * 5 : n * 5 + 5] for n in range(8)])
y = np.concatenate([series[:, n * 5 + 5] for n in range(8)])
model = keras.Sequential(
    [
        keras.Input(batch_shape=(8, 5, 1)),
        keras.layers.LSTM(8, stateful=True, return_sequences=True),
        keras.layers.LSTM(4, stateful=True),
        keras.layers.Dense(1),
    ]
)
model.compile(loss="mse", optimizer="rmsprop")
history = model.fit(
    x,
    y,
    batch_size=8,
    shuffle=False,
    epochs=3,
    verbose=0,
    callbacks=[ResetStates(), *kd.defaults(folder / "run", save_freq=4)],
)
