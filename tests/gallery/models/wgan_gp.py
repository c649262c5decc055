"""A WGAN with gradient penalty: two optimizers, several steps of the critic for every batch"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)


class WGAN(keras.Model):
    def __init__(self, critic, generator, latent_dim, critic_steps=2):
        super().__init__()
        self.critic = critic
        self.generator = generator
        self.latent_dim = latent_dim
        self.critic_steps = critic_steps

    def compile(self, critic_optimizer, generator_optimizer):
        super().compile()
        self.critic_optimizer = critic_optimizer
        self.generator_optimizer = generator_optimizer

    def gradient_penalty(self, real, fake):
        mix = tf.random.uniform([tf.shape(real)[0], 1, 1, 1])
        between = real + mix * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            scores = self.critic(between, training=True)
        slopes = tf.norm(tape.gradient(scores, between), axis=[1, 2])
        return tf.reduce_mean((slopes - 1.0) ** 2)

    def train_step(self, real):
        noise_shape = [tf.shape(real)[0], self.latent_dim]
        for _ in range(self.critic_steps):
            fake = self.generator(tf.random.normal(noise_shape), training=True)
            with tf.GradientTape() as tape:
                gap = tf.reduce_mean(self.critic(fake)) - tf.reduce_mean(self.critic(real))
                critic_loss = gap + 10.0 * self.gradient_penalty(real, fake)
            gradients = tape.gradient(critic_loss, self.critic.trainable_variables)
            pairs = zip(gradients, self.critic.trainable_variables, strict=True)
            self.critic_optimizer.apply_gradients(pairs)
        with tf.GradientTape() as tape:
            fake = self.generator(tf.random.normal(noise_shape), training=True)
            generator_loss = -tf.reduce_mean(self.critic(fake, training=True))
        gradients = tape.gradient(generator_loss, self.generator.trainable_variables)
        pairs = zip(gradients, self.generator.trainable_variables, strict=True)
        self.generator_optimizer.apply_gradients(pairs)
        return {"critic_loss": critic_loss, "generator_loss": generator_loss}


class Pictures(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        noise = tf.random.normal([4, self.model.latent_dim])
        pictures = self.model.generator(noise).numpy()
        np.save(folder / f"epoch_{epoch}.npy", pictures)


critic = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(4, 3, strides=2, padding="same"),
        keras.layers.LeakyReLU(0.2),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(1),
    ]
)
generator = keras.Sequential(
    [
        keras.Input((6,)),
        keras.layers.Dense(4 * 4 * 4, use_bias=False),
        keras.layers.BatchNormalization(),
        keras.layers.Reshape((4, 4, 4)),
        keras.layers.Conv2DTranspose(1, 3, strides=2, padding="same", activation="tanh"),
    ]
)
x = np.random.default_rng(0).uniform(-1, 1, (64, 8, 8, 1)).astype("float32")
model = WGAN(critic, generator, latent_dim=6)
model.compile(
    critic_optimizer=keras.optimizers.Adam(2e-3, beta_1=0.5, beta_2=0.9),
    generator_optimizer=keras.optimizers.Adam(2e-3, beta_1=0.5, beta_2=0.9),
)
history = model.fit(
    x,
    batch_size=8,
    epochs=3,
    verbose=0,
    callbacks=[Pictures(), *kd.defaults(folder / "run", save_freq=4)],
)
