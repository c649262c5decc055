"""Mixup: two shuffled datasets, mixed in proportions that `tf.random` draws"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)


def beta_distribution(size, concentration):
    first, second = (tf.random.gamma([size], alpha=concentration) for _ in range(2))
    return first / (first + second)


def mix_up(one, other, alpha=0.2):
    (images_one, labels_one), (images_other, labels_other) = one, other
    share = beta_distribution(tf.shape(images_one)[0], alpha)
    of_images, of_labels = tf.reshape(share, (-1, 1, 1, 1)), tf.reshape(share, (-1, 1))
    images = images_one * of_images + images_other * (1 - of_images)
    return images, labels_one * of_labels + labels_other * (1 - of_labels)


rng = np.random.default_rng(0)
x, y = rng.random((80, 8, 8, 1), "float32"), np.eye(3, dtype="float32")[rng.integers(0, 3, 80)]
one, other = (
    tf.data.Dataset.from_tensor_slices((x[:64], y[:64])).shuffle(640).batch(8) for _ in range(2)
)
train = tf.data.Dataset.zip((one, other)).map(lambda a, b: mix_up(a, b, alpha=0.2))
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(4, 3, activation="relu"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Dropout(0.2),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(3, activation="softmax"),
    ]
)
model.compile("adam", "categorical_crossentropy", metrics=["accuracy"])
history = model.fit(
    train,
    validation_data=tf.data.Dataset.from_tensor_slices((x[64:], y[64:])).batch(8),
    epochs=3,
    verbose=0,
    callbacks=kd.defaults(folder / "run", save_freq=4),
)
