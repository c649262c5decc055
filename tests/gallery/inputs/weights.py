"""Arrays with class weights, a sample weight per row, and `validation_split`"""

import sys
from pathlib import Path

import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(40, 4)), rng.integers(0, 3, 40)
model = keras.Sequential(
    [keras.Input((4,)), keras.layers.Dropout(0.2), keras.layers.Dense(3, activation="softmax")]
)
model.compile("adam", "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
history = model.fit(
    x,
    y,
    sample_weight=rng.random(40),
    validation_split=0.2,
    batch_size=8,
    epochs=3,
    verbose=0,
    callbacks=kd.defaults(folder / "run", save_freq=2),
)
