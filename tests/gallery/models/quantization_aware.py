"""Quantization-aware training: fake quantization of weights, moving ranges of activations"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)


class QuantizedDense(keras.layers.Dense):
    def build(self, input_shape):
        super().build(input_shape)
        self.top = self.add_weight(name="top", initializer="ones", trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.top.assign(0.9 * self.top + 0.1 * tf.reduce_max(tf.abs(inputs)))
        inputs = tf.quantization.fake_quant_with_min_max_vars(inputs, -self.top, self.top)
        most = tf.reduce_max(tf.abs(self.kernel))
        kernel = tf.quantization.fake_quant_with_min_max_vars(self.kernel, -most, most)
        return self.activation(tf.matmul(inputs, kernel) + self.bias)


rng = np.random.default_rng(0)
x, y = rng.normal(size=(64, 6)).astype("float32"), rng.integers(0, 3, 64)
model = keras.Sequential(
    [keras.Input((6,)), QuantizedDense(8, activation="relu"), QuantizedDense(3)]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
history = model.fit(
    x,
    y,
    batch_size=8,
    epochs=3,
    verbose=0,
    callbacks=kd.defaults(folder / "run", save_freq=4),
)
