"""KL annealing: a variable outside of the model, raised by a callback"""

import sys
from pathlib import Path

import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)


class Sampling(keras.layers.Layer):
    def __init__(self, beta):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(7)
        self.get_beta = lambda: beta

    def call(self, mean, log_var):
        divergence = -0.5 * keras.ops.sum(1 + log_var - mean**2 - keras.ops.exp(log_var), -1)
        self.add_loss(self.get_beta() * keras.ops.mean(divergence))
        noise = keras.random.normal(keras.ops.shape(mean), seed=self.seed_generator)
        return mean + keras.ops.exp(0.5 * log_var) * noise


class Annealing(keras.callbacks.Callback):
    def __init__(self, beta, step):
        super().__init__()
        self.beta = beta
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        self.beta.assign(min(1.0, float(self.beta.value) + self.step))


beta = keras.Variable(0.0, trainable=False, name="beta")
x = np.random.default_rng(0).random((64, 6), "float32")
inputs = keras.Input((6,))
h = keras.layers.Dense(8, activation="relu")(inputs)
z = Sampling(beta)(keras.layers.Dense(2)(h), keras.layers.Dense(2)(h))
outputs = keras.layers.Dense(6, activation="sigmoid")(keras.layers.Dense(8, activation="relu")(z))
model = keras.Model(inputs, outputs)
model.compile(keras.optimizers.Adam(1e-2), "binary_crossentropy")
history = model.fit(
    x,
    x,
    batch_size=8,
    epochs=3,
    verbose=0,
    callbacks=[Annealing(beta, step=0.05), *kd.defaults(folder / "run", save_freq=4)],
)
