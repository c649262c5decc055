"""Gradient accumulation over three batches, with `steps_per_execution` and a schedule"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(64, 4)).astype("float32"), rng.integers(0, 2, (64, 1))
train = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(64).batch(8)
model = keras.Sequential(
    [
        keras.Input((4,)),
        keras.layers.Dense(8, activation="relu", kernel_regularizer="l2"),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)
optimizer = keras.optimizers.Adam(
    keras.optimizers.schedules.PolynomialDecay(1e-2, 24, 1e-3),
    gradient_accumulation_steps=3,
    global_clipnorm=1.0,
)
model.compile(optimizer, "binary_focal_crossentropy", metrics=["AUC"], steps_per_execution=2)
history = model.fit(train, epochs=3, verbose=0, callbacks=kd.defaults(folder / "run", save_freq=4))
