"""Averaged weights: `use_ema` in the optimizer, swapped in for validation by `SwapEMAWeights`"""

import sys
from pathlib import Path

import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(80, 4)).astype("float32"), rng.normal(size=(80, 1)).astype("float32")
model = keras.Sequential(
    [keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1, name="out")]
)
optimizer = keras.optimizers.Lion(
    keras.optimizers.schedules.ExponentialDecay(
        1e-2, decay_steps=8, decay_rate=0.9, staircase=True
    ),
    use_ema=True,
    ema_momentum=0.9,
    clipnorm=1.0,
)
model.compile(optimizer, "mse", metrics=[keras.metrics.R2Score()])
best = keras.callbacks.ModelCheckpoint(
    folder / "{epoch:02d}.weights.h5", monitor="val_r2_score", mode="max", save_weights_only=True
)
history = model.fit(
    x[:64],
    y[:64],
    batch_size=8,
    epochs=3,
    validation_data=(x[64:], y[64:]),
    verbose=0,
    callbacks=[
        keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
        best,
        *kd.defaults(folder / "run", save_freq=4),
    ],
)
