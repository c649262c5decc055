"""A conditional GAN: labels as channels, a `SeedGenerator`, trackers in `metrics`"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)


class ConditionalGAN(keras.Model):
    def __init__(self, discriminator, generator, latent_dim):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent_dim = latent_dim
        self.seed_generator = keras.random.SeedGenerator(seed=1337)
        self.d_tracker = keras.metrics.Mean(name="discriminator_loss")
        self.g_tracker = keras.metrics.Mean(name="generator_loss")

    @property
    def metrics(self):
        return [self.d_tracker, self.g_tracker]

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn

    def generated(self, labels):
        shape = (keras.ops.shape(labels)[0], self.latent_dim)
        noise = keras.random.normal(shape, seed=self.seed_generator)
        return self.generator(keras.ops.concatenate([noise, labels], axis=-1))

    def train_step(self, data):
        real, labels = data
        planes = keras.ops.tile(labels[:, None, None, :], (1, 8, 8, 1))
        fake = self.generated(labels)
        pictures = keras.ops.concatenate([fake, real], axis=0)
        both = keras.ops.concatenate([pictures, keras.ops.tile(planes, (2, 1, 1, 1))], axis=-1)
        is_fake = keras.ops.concatenate(
            [keras.ops.ones_like(labels[:, :1]), keras.ops.zeros_like(labels[:, :1])], axis=0
        )
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(is_fake, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            joined = keras.ops.concatenate([self.generated(labels), planes], axis=-1)
            misleading = keras.ops.zeros_like(labels[:, :1])
            g_loss = self.loss_fn(misleading, self.discriminator(joined))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_tracker.update_state(d_loss)
        self.g_tracker.update_state(g_loss)
        return {"d_loss": self.d_tracker.result(), "g_loss": self.g_tracker.result()}


discriminator = keras.Sequential(
    [
        keras.Input((8, 8, 1 + 3)),
        keras.layers.Conv2D(4, 3, strides=2, padding="same"),
        keras.layers.LeakyReLU(negative_slope=0.2),
        keras.layers.GlobalMaxPooling2D(),
        keras.layers.Dense(1),
    ]
)
generator = keras.Sequential(
    [
        keras.Input((6 + 3,)),
        keras.layers.Dense(4 * 4 * 2),
        keras.layers.Reshape((4, 4, 2)),
        keras.layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="sigmoid"),
    ]
)
rng = np.random.default_rng(0)
x = rng.random((64, 8, 8, 1), "float32")
labels = keras.utils.to_categorical(rng.integers(0, 3, 64), 3)
train = tf.data.Dataset.from_tensor_slices((x, labels)).shuffle(64).batch(8)
model = ConditionalGAN(discriminator, generator, latent_dim=6)
model.compile(
    d_optimizer=keras.optimizers.Adam(3e-3),
    g_optimizer=keras.optimizers.Adam(3e-3),
    loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
)
history = model.fit(train, epochs=3, verbose=0, callbacks=kd.defaults(folder / "run", save_freq=4))
