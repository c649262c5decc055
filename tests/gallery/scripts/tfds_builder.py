"""A TensorFlow Datasets builder, with `shuffle_files`"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow_datasets as tfds

import keras_distplug as kd

folder = Path(sys.argv[1])


class Rows(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {"x": tfds.features.Tensor(shape=(4,), dtype=np.float32), "y": np.float32}
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict(features), supervised_keys=("x", "y")
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for number, row in enumerate(np.random.default_rng(0).normal(size=(32, 4))):
            yield number, {"x": row.astype("float32"), "y": np.float32(row.sum())}


keras.utils.set_random_seed(1)
builder = Rows(data_dir=folder / "tfds")
builder.download_and_prepare()
train = builder.as_dataset(split="train", as_supervised=True, shuffle_files=True)
train = train.shuffle(32).batch(8).prefetch(2)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile("adam", "mse")
history = model.fit(train, epochs=3, verbose=0, callbacks=kd.defaults(folder / "run", save_freq=2))
