"""Int8 weights with LoRA: `quantize("int8")` of a trained model, then `enable_lora`"""

import sys
from pathlib import Path

import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(64, 6)).astype("float32"), rng.integers(0, 3, 64)
model = keras.Sequential(
    [
        keras.Input((6,)),
        keras.layers.Dense(16, activation="relu", name="one"),
        keras.layers.Dense(16, activation="relu", name="two"),
        keras.layers.Dense(3, name="logits"),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("adam", loss)
model.fit(x, y, batch_size=8, epochs=1, verbose=0)

model.quantize("int8")
for name in ("one", "two"):
    model.get_layer(name).enable_lora(rank=4)
model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
history = model.fit(
    x,
    y,
    batch_size=8,
    epochs=3,
    verbose=0,
    callbacks=kd.defaults(folder / "run", save_freq=4),
)
