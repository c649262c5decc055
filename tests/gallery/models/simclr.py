"""SimCLR: augmentation in `train_step`, labeled and unlabeled data, an online linear probe"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)


class ContrastiveModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.temperature = 0.1
        self.augmenter = keras.Sequential(
            [
                keras.layers.RandomFlip("horizontal"),
                keras.layers.RandomTranslation(0.2, 0.2),
                keras.layers.RandomBrightness(0.2, value_range=(0, 1)),
            ]
        )
        self.encoder = keras.Sequential(
            [
                keras.Input((8, 8, 3)),
                keras.layers.Conv2D(4, 3, strides=2, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(8, activation="relu"),
            ]
        )
        self.projection_head = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        self.linear_probe = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])

    def compile(self, contrastive_optimizer, probe_optimizer, **kwargs):
        super().compile(**kwargs)
        self.contrastive_optimizer = contrastive_optimizer
        self.probe_optimizer = probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.contrastive_tracker = keras.metrics.Mean(name="c_loss")
        self.contrastive_accuracy = keras.metrics.SparseCategoricalAccuracy(name="c_acc")
        self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    @property
    def metrics(self):
        return [self.contrastive_tracker, self.contrastive_accuracy, self.probe_accuracy]

    def contrastive_loss(self, one, other):
        one, other = keras.ops.normalize(one, axis=1), keras.ops.normalize(other, axis=1)
        similarities = keras.ops.matmul(one, keras.ops.transpose(other)) / self.temperature
        labels = keras.ops.arange(keras.ops.shape(one)[0])
        self.contrastive_accuracy.update_state(labels, similarities)
        crossentropy = keras.losses.sparse_categorical_crossentropy
        there = crossentropy(labels, similarities, from_logits=True)
        back = crossentropy(labels, keras.ops.transpose(similarities), from_logits=True)
        return keras.ops.mean(there + back) / 2

    def train_step(self, data):
        (unlabeled, _), (labeled, labels) = data
        images = keras.ops.concatenate((unlabeled, labeled), axis=0)
        with tf.GradientTape() as tape:
            views = [self.augmenter(images, training=True) for _ in range(2)]
            one, other = (self.projection_head(self.encoder(view)) for view in views)
            loss = self.contrastive_loss(one, other)
        weights = self.encoder.trainable_weights + self.projection_head.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.contrastive_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.contrastive_tracker.update_state(loss)
        features = self.encoder(self.augmenter(labeled, training=True), training=False)
        with tf.GradientTape() as tape:
            logits = self.linear_probe(features, training=True)
            loss = self.probe_loss(labels, logits)
        weights = self.linear_probe.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.probe_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.probe_accuracy.update_state(labels, logits)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data):
        images, labels = data
        self.probe_accuracy.update_state(labels, self.linear_probe(self.encoder(images)))
        return {"p_acc": self.probe_accuracy.result()}


rng = np.random.default_rng(0)
x, y = rng.random((96, 8, 8, 3), "float32"), rng.integers(0, 3, 96)
unlabeled = tf.data.Dataset.from_tensor_slices((x[:64], y[:64])).shuffle(64).batch(8)
labeled = tf.data.Dataset.from_tensor_slices((x[64:80], y[64:80])).shuffle(16).batch(2)
model = ContrastiveModel()
model.compile(keras.optimizers.Adam(), keras.optimizers.Adam())
history = model.fit(
    tf.data.Dataset.zip((unlabeled, labeled)).prefetch(2),
    validation_data=tf.data.Dataset.from_tensor_slices((x[80:], y[80:])).batch(8),
    epochs=3,
    verbose=0,
    callbacks=kd.defaults(folder / "run", save_freq=4),
)
