"""A siamese network on triplets: one embedding of three inputs, a margin in `train_step`"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)


class DistanceLayer(keras.layers.Layer):
    def call(self, anchor, positive, negative):
        near = tf.reduce_sum(tf.square(anchor - positive), -1)
        return near, tf.reduce_sum(tf.square(anchor - negative), -1)


class SiameseModel(keras.Model):
    def __init__(self, siamese_network, margin=0.5):
        super().__init__()
        self.siamese_network = siamese_network
        self.margin = margin
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs):
        return self.siamese_network(inputs)

    def triplet_loss(self, data):
        near, far = self.siamese_network(data)
        return tf.maximum(near - far + self.margin, 0.0)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.triplet_loss(data)
        weights = self.siamese_network.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data):
        self.loss_tracker.update_state(self.triplet_loss(data))
        return {"loss": self.loss_tracker.result()}

    @property
    def metrics(self):
        return [self.loss_tracker]


embedding = keras.Sequential(
    [
        keras.layers.Conv2D(4, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(8, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(4),
    ],
    name="embedding",
)
inputs = [keras.Input((8, 8, 3), name=name) for name in ("anchor", "positive", "negative")]
outputs = DistanceLayer()(*(embedding(each) for each in inputs))
rng = np.random.default_rng(0)
images = [rng.random((80, 8, 8, 3), "float32") for _ in inputs]
triplets = tf.data.Dataset.zip(tuple(tf.data.Dataset.from_tensor_slices(x) for x in images))
triplets = triplets.shuffle(100, seed=3, reshuffle_each_iteration=False)
model = SiameseModel(keras.Model(inputs, outputs))
model.compile(optimizer=keras.optimizers.Adam(1e-3), weighted_metrics=[])
history = model.fit(
    triplets.take(64).batch(8).prefetch(8),
    validation_data=triplets.skip(64).batch(8).prefetch(8),
    epochs=3,
    verbose=0,
    callbacks=kd.defaults(folder / "run", save_freq=4),
)
