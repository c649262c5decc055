"""A variational autoencoder: `train_step` without `call`, a layer that samples"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)


class Sampling(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_var = inputs
        noise = keras.random.normal(keras.ops.shape(mean), seed=self.seed_generator)
        return mean + keras.ops.exp(0.5 * log_var) * noise


class VAE(keras.Model):
    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder = encoder
        self.decoder = decoder
        self.total = keras.metrics.Mean(name="total_loss")
        self.reconstruction = keras.metrics.Mean(name="reconstruction_loss")
        self.divergence = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [self.total, self.reconstruction, self.divergence]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_var, z = self.encoder(data)
            errors = keras.losses.binary_crossentropy(data, self.decoder(z))
            reconstruction = tf.reduce_sum(errors, axis=(1, 2))
            divergence = -0.5 * (1 + log_var - tf.square(mean) - tf.exp(log_var))
            divergence = tf.reduce_sum(divergence, axis=1)
            total = tf.reduce_mean(reconstruction + divergence)
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.total.update_state(total)
        self.reconstruction.update_state(reconstruction)
        self.divergence.update_state(divergence)
        return {metric.name: metric.result() for metric in self.metrics}


pictures = keras.Input((8, 8, 1))
h = keras.layers.Conv2D(4, 3, activation="relu", strides=2, padding="same")(pictures)
h = keras.layers.Dense(8, activation="relu")(keras.layers.Flatten()(h))
mean, log_var = keras.layers.Dense(2, name="mean")(h), keras.layers.Dense(2, name="log_var")(h)
encoder = keras.Model(pictures, [mean, log_var, Sampling()([mean, log_var])], name="encoder")
latent = keras.Input((2,))
h = keras.layers.Reshape((4, 4, 4))(keras.layers.Dense(64, activation="relu")(latent))
h = keras.layers.Conv2DTranspose(1, 3, activation="sigmoid", strides=2, padding="same")(h)
decoder = keras.Model(latent, h, name="decoder")
x = np.random.default_rng(0).random((64, 8, 8, 1), "float32")
model = VAE(encoder, decoder)
model.compile(optimizer=keras.optimizers.Adam(1e-2))
history = model.fit(
    x,
    batch_size=8,
    epochs=3,
    verbose=0,
    callbacks=kd.defaults(folder / "run", save_freq=4),
)
