"""A shuffled Grain dataset"""

import sys
from pathlib import Path

import grain
import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
train = grain.MapDataset.source([(row, row.sum(keepdims=True)) for row in x])
train = train.shuffle(seed=4).batch(8)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile("adam", "mse")
history = model.fit(train, epochs=3, verbose=0, callbacks=kd.defaults(folder / "run", save_freq=2))
