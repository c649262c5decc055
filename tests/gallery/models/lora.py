"""LoRA: a trained base model, with all weights frozen except the matrices of `enable_lora`"""

import sys
from pathlib import Path

import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x, y = rng.integers(0, 40, (64, 10)), rng.integers(0, 3, 64)
inputs = keras.Input((10,), dtype="int32")
h = keras.layers.Embedding(40, 8, name="embedding")(inputs)
h = h + keras.layers.MultiHeadAttention(2, 4, name="attention")(h, h)
h = keras.layers.GlobalAveragePooling1D()(h)
h = keras.layers.Dense(8, activation="relu", name="hidden")(h)
model = keras.Model(inputs, keras.layers.Dense(3, name="head")(h))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer="adam", loss=loss)
model.fit(x, y, batch_size=8, epochs=1, verbose=0)

for layer in model._flatten_layers(include_self=False):
    if hasattr(layer, "enable_lora") and layer.name != "head":
        layer.enable_lora(rank=2)
model.get_layer("head").trainable = False
optimizer = keras.optimizers.AdamW(learning_rate=5e-3, weight_decay=0.01)
optimizer.exclude_from_weight_decay(var_names=["bias", "scale"])
model.compile(optimizer=optimizer, loss=loss, weighted_metrics=["sparse_categorical_accuracy"])
history = model.fit(
    x,
    y,
    batch_size=8,
    epochs=3,
    verbose=0,
    callbacks=kd.defaults(folder / "run", save_freq=4),
)
