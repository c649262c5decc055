"""Mixed precision: a global policy, loss scaling, a `float32` output"""

import sys
from pathlib import Path

import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)
keras.mixed_precision.set_global_policy("mixed_float16")
rng = np.random.default_rng(0)
x, y = rng.random((64, 8, 8, 3), "float32"), rng.integers(0, 3, 64)
inputs = keras.Input((8, 8, 3))
h = keras.layers.Conv2D(4, 3, use_bias=False)(keras.layers.RandomFlip()(inputs))
h = keras.layers.ReLU()(keras.layers.BatchNormalization()(h))
h = keras.layers.Dense(3)(keras.layers.GlobalAveragePooling2D()(h))
outputs = keras.layers.Activation("softmax", dtype="float32")(h)
model = keras.Model(inputs, outputs)
optimizer = keras.optimizers.SGD(1e-2, momentum=0.9, nesterov=True)
optimizer = keras.optimizers.LossScaleOptimizer(optimizer, dynamic_growth_steps=6)
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(
    x,
    y,
    batch_size=8,
    epochs=3,
    verbose=0,
    callbacks=kd.defaults(folder / "run", save_freq=4),
)
