"""Sentiment with stacked bidirectional LSTMs and recurrent dropout"""

import sys
from pathlib import Path

import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
reviews = [rng.integers(1, 50, n).tolist() for n in rng.integers(4, 16, 80)]
x = keras.utils.pad_sequences(reviews, maxlen=12)
y = rng.integers(0, 2, 80)
inputs = keras.Input((None,), dtype="int32")
h = keras.layers.Embedding(50, 8, mask_zero=True)(inputs)
h = keras.layers.Bidirectional(keras.layers.LSTM(4, return_sequences=True))(h)
h = keras.layers.Bidirectional(keras.layers.LSTM(4, dropout=0.2, recurrent_dropout=0.2))(h)
model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(h))
model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
history = model.fit(
    x[:64],
    y[:64],
    batch_size=8,
    epochs=3,
    validation_data=(x[64:], y[64:]),
    verbose=0,
    callbacks=kd.defaults(folder / "run", save_freq=4),
)
