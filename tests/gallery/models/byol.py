"""BYOL: a target network that follows the online network, views made by a pipeline"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)


def view(image):
    image = tf.image.random_crop(tf.pad(image, [[1, 1], [1, 1], [0, 0]]), [8, 8, 3])
    return tf.image.random_brightness(tf.image.random_flip_left_right(image), 0.2)


class BYOL(keras.Model):
    def __init__(self, encoder, predictor, momentum=0.9):
        super().__init__()
        self.online_encoder = encoder
        self.predictor = predictor
        self.momentum = momentum
        self.target_encoder = keras.models.clone_model(encoder)
        self.target_encoder.set_weights(encoder.get_weights())
        self.target_encoder.trainable = False
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @tf.function
    def distance(self, online, target):
        online, target = tf.math.l2_normalize(online, -1), tf.math.l2_normalize(target, -1)
        return 2 - 2 * tf.reduce_mean(tf.reduce_sum(online * target, axis=-1))

    def train_step(self, views):
        one, other = views
        target_one, target_other = self.target_encoder(one), self.target_encoder(other)
        with tf.GradientTape() as tape:
            online_one = self.predictor(self.online_encoder(one, training=True))
            online_other = self.predictor(self.online_encoder(other, training=True))
            loss = self.distance(online_one, tf.stop_gradient(target_other))
            loss += self.distance(online_other, tf.stop_gradient(target_one))
        weights = self.online_encoder.trainable_weights + self.predictor.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        pairs = zip(self.online_encoder.weights, self.target_encoder.weights, strict=True)
        for online, target in pairs:
            target.assign(self.momentum * target + (1 - self.momentum) * online)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


encoder = keras.Sequential(
    [
        keras.Input((8, 8, 3)),
        keras.layers.Conv2D(4, 3, strides=2, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Flatten(),
        keras.layers.Dense(4),
    ]
)
predictor = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
x = np.random.default_rng(0).random((64, 8, 8, 3), "float32")
train = tf.data.Dataset.from_tensor_slices(x).shuffle(64)
train = train.map(lambda image: (view(image), view(image))).batch(8)
model = BYOL(encoder, predictor)
model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9))
history = model.fit(train, epochs=3, verbose=0, callbacks=kd.defaults(folder / "run", save_freq=4))
