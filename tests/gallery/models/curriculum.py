"""A curriculum: a callback makes the samples of a `PyDataset` harder from epoch to epoch"""

import sys
from pathlib import Path

import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)


class Sums(keras.utils.PyDataset):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.length = 2

    def __len__(self):
        return 8

    def __getitem__(self, index):
        x = np.zeros((8, 6), "float32")
        x[:, : self.length] = np.random.default_rng(index).normal(size=(8, self.length))
        return x, x.sum(1, keepdims=True)


class Curriculum(keras.callbacks.Callback):
    def __init__(self, dataset, threshold):
        super().__init__()
        self.dataset = dataset
        self.threshold = threshold
        self.harder = 0

    def on_epoch_end(self, epoch, logs=None):
        if logs["loss"] < self.threshold and self.dataset.length < 6:
            self.dataset.length += 2
            self.harder += 1
            self.model.optimizer.learning_rate *= 0.5


sums = Sums()
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile("adam", "mse")
history = model.fit(
    sums,
    epochs=3,
    shuffle=False,
    verbose=0,
    callbacks=[Curriculum(sums, threshold=10.0), *kd.defaults(folder / "run", save_freq=4)],
)
