"""A worker that trains with plain `fit`, evaluates and predicts, and prints what Keras prints."""

from __future__ import annotations

import sys

import numpy as np

import keras_distplug as kd

strategy = kd.init()

import keras  # noqa: E402

keras.utils.set_random_seed(1)
x = np.random.rand(16, 4).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(x, x[:, :1], batch_size=8, epochs=2, callbacks=kd.defaults(sys.argv[1]))
model.evaluate(x, x[:, :1], batch_size=8)
print("evaluated", flush=True)
