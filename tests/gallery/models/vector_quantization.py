"""A VQ-VAE: a codebook layer that calls `add_loss`, `sum(model.losses)` in `train_step`"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)
# With these, 1 of 24 runs of plain Keras reports a total loss that differs in its last bit.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


class VectorQuantizer(keras.layers.Layer):
    def __init__(self, codes, size, beta=0.25, **kwargs):
        super().__init__(**kwargs)
        self.codes, self.size, self.beta = codes, size, beta
        initial = tf.random_uniform_initializer()(shape=(size, codes), dtype="float32")
        self.embeddings = self.add_weight(
            shape=(size, codes), initializer=lambda shape, dtype: initial, trainable=True
        )

    def call(self, x):
        flat = tf.reshape(x, [-1, self.size])
        distances = tf.reduce_sum(flat**2, axis=1, keepdims=True)
        distances += tf.reduce_sum(self.embeddings**2, axis=0) - 2 * flat @ self.embeddings
        chosen = tf.one_hot(tf.argmin(distances, axis=1), self.codes)
        quantized = tf.reshape(tf.matmul(chosen, self.embeddings, transpose_b=True), tf.shape(x))
        commitment = tf.reduce_mean((tf.stop_gradient(quantized) - x) ** 2)
        codebook = tf.reduce_mean((quantized - tf.stop_gradient(x)) ** 2)
        self.add_loss(self.beta * commitment + codebook)
        return x + tf.stop_gradient(quantized - x)


class VQVAETrainer(keras.Model):
    def __init__(self, variance, **kwargs):
        super().__init__(**kwargs)
        self.variance = variance
        inputs = keras.Input((8, 8, 1))
        h = keras.layers.Conv2D(4, 3, activation="relu", strides=2, padding="same")(inputs)
        h = VectorQuantizer(8, 4, name="vector_quantizer")(h)
        h = keras.layers.Conv2DTranspose(1, 3, strides=2, padding="same")(h)
        self.vqvae = keras.Model(inputs, h)
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.vq_loss_tracker = keras.metrics.Mean(name="vq_loss")

    @property
    def metrics(self):
        return [self.total_loss_tracker, self.vq_loss_tracker]

    def train_step(self, x):
        with tf.GradientTape() as tape:
            reconstructions = self.vqvae(x)
            error = tf.reduce_mean((x - reconstructions) ** 2) / self.variance
            total = error + sum(self.vqvae.losses)
        gradients = tape.gradient(total, self.vqvae.trainable_variables)
        pairs = zip(gradients, self.vqvae.trainable_variables, strict=True)
        self.optimizer.apply_gradients(pairs)
        self.total_loss_tracker.update_state(total)
        self.vq_loss_tracker.update_state(sum(self.vqvae.losses))
        return {metric.name: metric.result() for metric in self.metrics}


x = np.random.default_rng(0).random((64, 8, 8, 1), "float32")
model = VQVAETrainer(variance=np.var(x))
model.compile(optimizer=keras.optimizers.Adam(1e-2))
history = model.fit(
    x,
    epochs=3,
    batch_size=8,
    verbose=0,
    callbacks=kd.defaults(folder / "run", save_freq=4),
)
