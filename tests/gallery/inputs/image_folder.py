"""A folder of pictures, with augmentation layers in the pipeline"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
rng = np.random.default_rng(0)
for label in ("cat", "dog"):
    (folder / "images" / label).mkdir(parents=True, exist_ok=True)
    for number in range(14):
        picture = rng.integers(0, 256, (8, 8, 3)).astype("uint8")
        path = folder / "images" / label / f"a_rather_long_name_of_a_picture_{number:04d}.png"
        path.write_bytes(tf.io.encode_png(picture).numpy())

keras.utils.set_random_seed(1)
train = keras.utils.image_dataset_from_directory(
    folder / "images", image_size=(8, 8), batch_size=4, seed=3, verbose=False
)
augment = keras.Sequential(
    [keras.layers.RandomFlip("horizontal"), keras.layers.RandomRotation(0.1)]
)
train = train.map(lambda x, y: (augment(x, training=True), y)).prefetch(tf.data.AUTOTUNE)
model = keras.Sequential(
    [
        keras.layers.Rescaling(1 / 255),
        keras.layers.Conv2D(4, 3, activation="relu"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(1),
    ]
)
model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
history = model.fit(train, epochs=3, verbose=0, callbacks=kd.defaults(folder / "run", save_freq=2))
