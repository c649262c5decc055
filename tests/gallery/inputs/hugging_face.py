"""A Hugging Face dataset, through `to_tf_dataset`"""

import sys
from pathlib import Path

import datasets
import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
rows = datasets.Dataset.from_dict({"x": x, "label": (x.sum(1) > 0).astype(int)})
train = rows.to_tf_dataset(columns="x", label_cols="label", batch_size=8, shuffle=True)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
history = model.fit(train, epochs=3, verbose=0, callbacks=kd.defaults(folder / "run", save_freq=2))
