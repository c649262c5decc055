"""A memory-mapped array, shuffled by `fit`"""

import sys
from pathlib import Path

import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
np.save(folder / "x.npy", np.random.default_rng(0).normal(size=(32, 4)).astype("float32"))

keras.utils.set_random_seed(1)
x = np.load(folder / "x.npy", mmap_mode="r")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile("adam", "mse")
history = model.fit(
    x,
    x[:, :1],
    batch_size=8,
    epochs=3,
    verbose=0,
    callbacks=kd.defaults(folder / "run", save_freq=2),
)
