"""A callback that unfreezes the base after an epoch, and compiles the model again"""

import sys
from pathlib import Path

import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)


class Unfreeze(keras.callbacks.Callback):
    def __init__(self, layer, epoch):
        super().__init__()
        self.layer = layer
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            self.layer.trainable = True
            self.model.compile(keras.optimizers.Adam(1e-3), "mse", metrics=["mae"])
            self.model.make_train_function(force=True)


rng = np.random.default_rng(0)
x, y = rng.normal(size=(64, 4)).astype("float32"), rng.normal(size=(64, 1)).astype("float32")
base = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="relu")], name="base")
base.trainable = False
model = keras.Sequential([keras.Input((4,)), base, keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(1e-2), "mse", metrics=["mae"])
history = model.fit(
    x,
    y,
    batch_size=8,
    epochs=3,
    verbose=0,
    callbacks=[Unfreeze(base, epoch=1), *kd.defaults(folder / "run", save_freq=4)],
)
