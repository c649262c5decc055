"""A TensorFlow Datasets dataset, with `shuffle_files`"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

import keras_distplug as kd

folder = Path(sys.argv[1])
x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
if not (folder / "tfds").exists():
    features = {"x": tfds.features.Tensor(shape=(4,), dtype=np.float32), "y": np.float32}
    tfds.dataset_builders.store_as_tfds_dataset(
        name="rows",
        version="1.0.0",
        features=tfds.features.FeaturesDict(features),
        split_datasets={"train": tf.data.Dataset.from_tensor_slices({"x": x, "y": x.sum(1)})},
        data_dir=folder / "tfds",
    )

keras.utils.set_random_seed(1)
builder = tfds.builder("rows", data_dir=folder / "tfds")
train = builder.as_dataset(split="train", shuffle_files=True)
train = train.map(lambda row: (row["x"], row["y"])).shuffle(32).batch(8).prefetch(2)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile("adam", "mse")
history = model.fit(train, epochs=3, verbose=0, callbacks=kd.defaults(folder / "run", save_freq=2))
