"""A sequence-to-sequence model: LSTM states passed from encoder to decoder, teacher forcing"""

import sys
from pathlib import Path

import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
source = np.eye(6, dtype="float32")[rng.integers(0, 6, (80, 7))]
target = np.eye(6, dtype="float32")[rng.integers(0, 6, (80, 6))]
encoder_inputs = keras.Input((None, 6))
_, state_h, state_c = keras.layers.LSTM(8, return_state=True)(encoder_inputs)
decoder_inputs = keras.Input((None, 6))
decoder = keras.layers.LSTM(8, return_sequences=True, return_state=True)
decoded, _, _ = decoder(decoder_inputs, initial_state=[state_h, state_c])
outputs = keras.layers.Dense(6, activation="softmax")(decoded)
model = keras.Model([encoder_inputs, decoder_inputs], outputs)
model.compile(optimizer="rmsprop", loss="categorical_crossentropy", metrics=["accuracy"])
history = model.fit(
    [source, target[:, :-1]],
    target[:, 1:],
    batch_size=8,
    epochs=3,
    validation_split=0.2,
    verbose=0,
    callbacks=kd.defaults(folder / "run", save_freq=4),
)
