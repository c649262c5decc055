"""Transfer learning in two fits: a frozen base, then all of it, with a folder per fit"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x, y = rng.random((80, 8, 8, 3), "float32"), rng.integers(0, 2, (80, 1))
train = tf.data.Dataset.from_tensor_slices((x[:64], y[:64])).shuffle(64).batch(8).prefetch(2)
val = tf.data.Dataset.from_tensor_slices((x[64:], y[64:])).batch(8)
base = keras.Sequential(
    [
        keras.Input((8, 8, 3)),
        keras.layers.Conv2D(4, 3, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Conv2D(4, 3, activation="relu"),
    ],
    name="base",
)
base.trainable = False
inputs = keras.Input((8, 8, 3))
h = keras.layers.RandomFlip("horizontal")(inputs)
h = base(keras.layers.Rescaling(scale=2, offset=-1)(h), training=False)
h = keras.layers.Dropout(0.2)(keras.layers.GlobalAveragePooling2D()(h))
model = keras.Model(inputs, keras.layers.Dense(1)(h))
loss = keras.losses.BinaryCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(), loss, metrics=[keras.metrics.BinaryAccuracy()])
model.fit(
    train,
    epochs=1,
    validation_data=val,
    verbose=0,
    callbacks=kd.defaults(folder / "frozen", save_freq=4),
)

base.trainable = True
model.compile(keras.optimizers.Adam(1e-4), loss, metrics=[keras.metrics.BinaryAccuracy()])
history = model.fit(
    train,
    epochs=3,
    validation_data=val,
    verbose=0,
    callbacks=kd.defaults(folder / "fine_tuned", save_freq=4),
)
