"""A learning-rate finder: a callback raises the rate every batch, and stops at divergence"""

import sys
from pathlib import Path

import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)


class LearningRateFinder(keras.callbacks.Callback):
    def __init__(self, start, factor):
        super().__init__()
        self.start, self.factor = start, factor

    def on_train_begin(self, logs=None):
        self.rates, self.losses = [], []
        self.best, self.average = float("inf"), 0.0
        self.model.optimizer.learning_rate = self.start

    def on_train_batch_end(self, batch, logs=None):
        rate = float(self.model.optimizer.learning_rate)
        self.average = 0.9 * self.average + 0.1 * logs["loss"]
        smooth = self.average / (1 - 0.9 ** (len(self.losses) + 1))
        self.rates.append(rate)
        self.losses.append(smooth)
        self.best = min(self.best, smooth)
        if smooth > 4 * self.best:
            self.model.stop_training = True
        self.model.optimizer.learning_rate = rate * self.factor


rng = np.random.default_rng(0)
x = rng.normal(size=(64, 4)).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(1e-3), "mse")
finder = LearningRateFinder(start=1e-4, factor=1.4)
history = model.fit(
    x,
    x.sum(1, keepdims=True),
    batch_size=8,
    epochs=3,
    verbose=0,
    callbacks=[finder, *kd.defaults(folder / "run", save_freq=4)],
)
history.history["rates"], history.history["losses"] = finder.rates, finder.losses
