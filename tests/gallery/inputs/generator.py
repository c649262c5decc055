"""An endless Python generator, with `steps_per_epoch`"""

import sys
from pathlib import Path

import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)


def batches(seed):
    rng = np.random.default_rng(seed)
    while True:
        x = rng.normal(size=(8, 4)).astype("float32")
        yield x, x.sum(1, keepdims=True)


model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile("adam", "mse")
history = model.fit(
    batches(3),
    steps_per_epoch=5,
    epochs=3,
    verbose=0,
    callbacks=kd.defaults(folder / "run", save_freq=2),
)
