"""`ImageDataGenerator`, as older tutorials use it"""

import sys
from pathlib import Path

import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(32, 8, 8, 3)).astype("float32")
generator = keras.src.legacy.preprocessing.image.ImageDataGenerator(
    horizontal_flip=True, width_shift_range=0.1
)
train = generator.flow(x, np.arange(32) % 2, batch_size=8, seed=3)
model = keras.Sequential(
    [keras.Input((8, 8, 3)), keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(1)]
)
model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
history = model.fit(train, epochs=3, verbose=0, callbacks=kd.defaults(folder / "run", save_freq=2))
