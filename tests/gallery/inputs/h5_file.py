"""Datasets of an HDF5 file, without reading them first"""

import sys
from pathlib import Path

import h5py
import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
with h5py.File(folder / "data.h5", "w") as file:
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    file["x"], file["y"] = x, x.sum(1, keepdims=True)

keras.utils.set_random_seed(1)
file = h5py.File(folder / "data.h5", "r")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile("adam", "mse")
history = model.fit(
    file["x"],
    file["y"],
    batch_size=8,
    shuffle="batch",
    epochs=3,
    verbose=0,
    callbacks=kd.defaults(folder / "run", save_freq=2),
)
