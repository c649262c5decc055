"""Segmentation: a U-Net with separable convolutions, a mean IoU, images augmented with masks"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)


def block(h, filters, layer):
    h = keras.layers.BatchNormalization()(layer(filters, 3, padding="same")(h))
    return keras.layers.Activation("relu")(h)


inputs = keras.Input((16, 16, 3))
down1 = block(inputs, 4, keras.layers.Conv2D)
h = keras.layers.MaxPooling2D(2)(down1)
down2 = block(h, 8, keras.layers.SeparableConv2D)
h = block(keras.layers.MaxPooling2D(2)(down2), 8, keras.layers.SeparableConv2D)
h = block(keras.layers.UpSampling2D(2)(h), 8, keras.layers.Conv2DTranspose)
h = keras.layers.Concatenate()([h, down2])
h = block(keras.layers.UpSampling2D(2)(h), 4, keras.layers.Conv2DTranspose)
h = keras.layers.Concatenate()([h, down1])
model = keras.Model(inputs, keras.layers.Conv2D(3, 1, activation="softmax", padding="same")(h))


def flip(image, mask):
    both = tf.concat([image, tf.cast(mask, tf.float32)], axis=-1)
    both = tf.image.random_flip_left_right(both, seed=5)
    return both[..., :3], tf.cast(both[..., 3:], tf.int32)


rng = np.random.default_rng(0)
x, y = rng.random((80, 16, 16, 3), "float32"), rng.integers(0, 3, (80, 16, 16, 1))
train = tf.data.Dataset.from_tensor_slices((x[:64], y[:64])).shuffle(64).map(flip).batch(8)
val = tf.data.Dataset.from_tensor_slices((x[64:], y[64:])).batch(8)
model.compile(
    optimizer=keras.optimizers.Adam(1e-3),
    loss="sparse_categorical_crossentropy",
    metrics=[keras.metrics.MeanIoU(3, sparse_y_pred=False)],
)
best = keras.callbacks.ModelCheckpoint(folder / "segmentation.keras", save_best_only=True)
history = model.fit(
    train,
    validation_data=val,
    epochs=3,
    verbose=0,
    callbacks=[best, *kd.defaults(folder / "run", save_freq=4)],
)
