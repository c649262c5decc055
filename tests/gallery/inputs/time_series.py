"""Windows of a time series, from `timeseries_dataset_from_array`"""

import sys
from pathlib import Path

import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)
values = np.sin(np.arange(120) / 5).astype("float32")[:, None]
given = {"sequence_length": 10, "batch_size": 8, "shuffle": True, "seed": 2}
train = keras.utils.timeseries_dataset_from_array(values[:80], values[10:90], **given)
validation = keras.utils.timeseries_dataset_from_array(values[80:], values[90:], **given)
model = keras.Sequential(
    [keras.Input((10, 1)), keras.layers.LSTM(4, dropout=0.1), keras.layers.Dense(1)]
)
model.compile(keras.optimizers.Adam(0.01), "mse")
history = model.fit(
    train,
    validation_data=validation,
    epochs=3,
    verbose=0,
    callbacks=kd.defaults(folder / "run", save_freq=4),
)
