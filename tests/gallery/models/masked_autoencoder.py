"""A masked autoencoder: patches masked at random by `tf.random` in a layer, a warm-up schedule"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)


class PatchEncoder(keras.layers.Layer):
    def build(self, input_shape):
        _, self.patches, size = input_shape
        self.mask_token = self.add_weight(shape=(1, size), initializer="random_normal")
        self.position = keras.layers.Embedding(self.patches, size)

    def call(self, patches):
        order = tf.argsort(tf.random.uniform((tf.shape(patches)[0], self.patches)), axis=-1)
        is_masked = tf.cast(order < self.patches // 2, patches.dtype)[..., None]
        seen = patches * (1 - is_masked) + self.mask_token * is_masked
        return seen + self.position(tf.range(self.patches)), is_masked


class MaskedAutoencoder(keras.Model):
    def __init__(self):
        super().__init__()
        self.augment = keras.layers.RandomFlip("horizontal")
        self.split = keras.layers.Lambda(lambda x: tf.image.extract_patches(x, *_PATCHES, "VALID"))
        self.flatten = keras.layers.Reshape((16, 4))
        self.patch_encoder = PatchEncoder()
        self.encoder = keras.layers.MultiHeadAttention(2, 4, dropout=0.1)
        self.decoder = keras.layers.Dense(4)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def calculate_loss(self, images):
        patches = self.flatten(self.split(self.augment(images)))
        seen, is_masked = self.patch_encoder(patches)
        decoded = self.decoder(self.encoder(seen, seen, training=True))
        return self.compute_loss(y=patches * is_masked, y_pred=decoded * is_masked)

    def train_step(self, images):
        with tf.GradientTape() as tape:
            loss = self.calculate_loss(images)
        layers = (self.patch_encoder, self.encoder, self.decoder)
        weights = [weight for layer in layers for weight in layer.trainable_variables]
        gradients = tape.gradient(loss, weights)
        pairs = [(tf.clip_by_norm(g, 1.0), w) for g, w in zip(gradients, weights, strict=True)]
        self.optimizer.apply_gradients(pairs)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


_PATCHES = [1, 2, 2, 1], [1, 2, 2, 1], [1, 1, 1, 1]
schedule = keras.optimizers.schedules.CosineDecay(1e-4, 18, warmup_target=1e-2, warmup_steps=6)
x = np.random.default_rng(0).random((64, 8, 8, 1), "float32")
train = tf.data.Dataset.from_tensor_slices(x).shuffle(64).batch(8).prefetch(tf.data.AUTOTUNE)
model = MaskedAutoencoder()
model.compile(keras.optimizers.AdamW(schedule, weight_decay=1e-4), keras.losses.MeanSquaredError())
history = model.fit(train, epochs=3, verbose=0, callbacks=kd.defaults(folder / "run", save_freq=4))
