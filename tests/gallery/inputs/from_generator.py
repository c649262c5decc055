"""A Python function as input of `tf.data.Dataset.from_generator`"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)


def samples():
    rng = np.random.default_rng(5)
    for _ in range(30):
        x = rng.normal(size=4).astype("float32")
        yield x, x.sum(keepdims=True)


signature = (tf.TensorSpec([4], tf.float32), tf.TensorSpec([1], tf.float32))
train = tf.data.Dataset.from_generator(samples, output_signature=signature)
train = train.shuffle(30, seed=2).batch(8).apply(tf.data.experimental.assert_cardinality(4))
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile("adam", "mse")
history = model.fit(train, epochs=3, verbose=0, callbacks=kd.defaults(folder / "run", save_freq=2))
