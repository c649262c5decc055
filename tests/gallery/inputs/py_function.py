"""A list of files, loaded by NumPy in `tf.numpy_function`"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
rng = np.random.default_rng(0)
files = [str(folder / f"an_array_with_a_rather_long_name_{number:05d}.npy") for number in range(28)]
for name in files:
    np.save(name, rng.normal(size=4).astype("float32"))


def load(name):
    x = np.load(name.decode())
    return x, x.sum(keepdims=True)


def read(name):
    x, y = tf.numpy_function(load, [name], [tf.float32, tf.float32])
    return tf.ensure_shape(x, [4]), tf.ensure_shape(y, [1])


keras.utils.set_random_seed(1)
train = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files), seed=3)
train = train.map(read, num_parallel_calls=tf.data.AUTOTUNE).batch(4).prefetch(tf.data.AUTOTUNE)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile("adam", "mse")
history = model.fit(train, epochs=3, verbose=0, callbacks=kd.defaults(folder / "run", save_freq=2))
