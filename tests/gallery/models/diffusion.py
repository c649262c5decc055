"""Diffusion: an EMA network from `clone_model`, `tf.random` in `train_step` and `test_step`"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)


def denoiser():
    noisy, variances = keras.Input((8, 8, 1)), keras.Input((1, 1, 1))
    times = keras.layers.UpSampling2D(8, interpolation="nearest")(variances)
    h = keras.layers.Concatenate()([noisy, times])
    h = keras.layers.Conv2D(4, 3, padding="same", activation="swish")(h)
    h = keras.layers.BatchNormalization(center=False, scale=False)(h)
    return keras.Model([noisy, variances], keras.layers.Conv2D(1, 1)(h), name="denoiser")


class DiffusionModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.normalizer = keras.layers.Normalization()
        self.network = denoiser()
        self.ema_network = keras.models.clone_model(self.network)

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.noise_tracker = keras.metrics.Mean(name="n_loss")
        self.image_tracker = keras.metrics.Mean(name="i_loss")

    @property
    def metrics(self):
        return [self.noise_tracker, self.image_tracker]

    def losses_of(self, images, network, training):
        images = self.normalizer(images, training=True)
        batch = tf.shape(images)[0]
        noises = tf.random.normal([batch, 8, 8, 1])
        angles = tf.random.uniform([batch, 1, 1, 1], minval=0.1, maxval=1.4)
        signal, noise = tf.cos(angles), tf.sin(angles)
        noisy = signal * images + noise * noises
        predicted = network([noisy, noise**2], training=training)
        restored = (noisy - noise * predicted) / signal
        return self.loss(noises, predicted), self.loss(images, restored)

    def train_step(self, images):
        with tf.GradientTape() as tape:
            noise_loss, image_loss = self.losses_of(images, self.network, training=True)
        gradients = tape.gradient(noise_loss, self.network.trainable_weights)
        pairs = zip(gradients, self.network.trainable_weights, strict=True)
        self.optimizer.apply_gradients(pairs)
        self.noise_tracker.update_state(noise_loss)
        self.image_tracker.update_state(image_loss)
        both = zip(self.network.weights, self.ema_network.weights, strict=True)
        for weight, ema_weight in both:
            ema_weight.assign(0.9 * ema_weight + 0.1 * weight)
        return {m.name: m.result() for m in self.metrics[:-1]}

    def test_step(self, images):
        noise_loss, image_loss = self.losses_of(images, self.ema_network, training=False)
        self.noise_tracker.update_state(noise_loss)
        self.image_tracker.update_state(image_loss)
        return {m.name: m.result() for m in self.metrics}

    def plot_images(self, epoch=None, logs=None):
        steps = tf.random.normal([2, 8, 8, 1])
        np.save(folder / f"{epoch}.npy", self.ema_network([steps, tf.ones([2, 1, 1, 1])]).numpy())


x = np.random.default_rng(0).random((80, 8, 8, 1), "float32")
train = tf.data.Dataset.from_tensor_slices(x[:64]).cache().shuffle(64).batch(8).prefetch(2)
model = DiffusionModel()
model.compile(optimizer=keras.optimizers.AdamW(1e-2), loss=keras.losses.MeanAbsoluteError())
model.normalizer.adapt(train)
history = model.fit(
    train,
    epochs=3,
    validation_data=tf.data.Dataset.from_tensor_slices(x[64:]).batch(8),
    verbose=0,
    callbacks=[
        keras.callbacks.LambdaCallback(on_epoch_end=model.plot_images),
        *kd.defaults(folder / "run", save_freq=4),
    ],
)
