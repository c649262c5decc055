"""A `PyDataset` that shuffles in `on_epoch_end` and augments at random"""

import sys
from pathlib import Path

import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)


class Pictures(keras.utils.PyDataset):
    def __init__(self, x, y, batch_size):
        super().__init__()
        self.x, self.y, self.batch_size = x, y, batch_size
        self.indices = np.arange(len(x))

    def __len__(self):
        return len(self.x) // self.batch_size

    def __getitem__(self, index):
        rows = self.indices[index * self.batch_size : (index + 1) * self.batch_size]
        x = self.x[rows]
        return (x[:, ::-1] if np.random.random() < 0.5 else x), self.y[rows]

    def on_epoch_end(self):
        np.random.shuffle(self.indices)


x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile("adam", "mse")
history = model.fit(
    Pictures(x, x[:, :1], 8),
    validation_data=Pictures(x[:16], x[:16, :1], 8),
    epochs=3,
    verbose=0,
    callbacks=kd.defaults(folder / "run", save_freq=2),
)
