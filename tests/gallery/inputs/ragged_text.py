"""Ragged tokens, padded batch by batch"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
tokens = tf.ragged.constant([rng.integers(1, 50, rng.integers(3, 12)).tolist() for _ in range(32)])
labels = tf.constant(rng.integers(0, 2, 32))
train = tf.data.Dataset.from_tensor_slices((tokens, labels)).shuffle(32)
train = train.batch(8).map(lambda x, y: (x.to_tensor(), y))
model = keras.Sequential(
    [
        keras.layers.Embedding(50, 4, mask_zero=True),
        keras.layers.GRU(4),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile("adam", "binary_crossentropy")
history = model.fit(train, epochs=3, verbose=0, callbacks=kd.defaults(folder / "run", save_freq=2))
