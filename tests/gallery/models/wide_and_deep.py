"""Wide and deep: crossed columns next to embeddings, Ftrl, a monitored AUC"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
columns = {
    "work": rng.choice(["private", "state", "none"], 80),
    "degree": rng.choice(["BSc", "MSc", "PhD", "other"], 80),
    "age": rng.integers(18, 80, 80),
    "hours": rng.normal(38, 6, 80).astype("float32"),
}
y = rng.integers(0, 2, 80).astype("float32")
inputs = {name: keras.Input((1,), name=name, dtype="string") for name in ("work", "degree")}
inputs |= {name: keras.Input((1,), name=name) for name in ("age", "hours")}
wide, deep = [], []
for name in ("work", "degree"):
    vocabulary = sorted(set(columns[name]))
    one_hot = keras.layers.StringLookup(vocabulary=vocabulary, output_mode="one_hot")
    indices = keras.layers.StringLookup(vocabulary=vocabulary)(inputs[name])
    wide.append(one_hot(inputs[name]))
    deep.append(keras.layers.Flatten()(keras.layers.Embedding(len(vocabulary) + 1, 2)(indices)))
crossed = keras.layers.HashedCrossing(8, output_mode="one_hot")
wide.append(crossed((inputs["work"], inputs["degree"])))
for name in ("age", "hours"):
    normalization = keras.layers.Normalization()
    normalization.adapt(columns[name][:, None].astype("float32"))
    deep.append(normalization(inputs[name]))
wide = keras.layers.BatchNormalization()(keras.layers.concatenate(wide))
deep = keras.layers.Dense(8)(keras.layers.concatenate(deep))
deep = keras.layers.Dropout(0.1)(keras.layers.ReLU()(keras.layers.BatchNormalization()(deep)))
merged = keras.layers.concatenate([wide, deep])
model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(merged))
model.compile(
    optimizer=keras.optimizers.Ftrl(0.05, l1_regularization_strength=0.001),
    loss="binary_crossentropy",
    metrics=[keras.metrics.AUC(name="auc"), "accuracy"],
)
columns = {name: column[:, None] for name, column in columns.items()}
ds = tf.data.Dataset.from_tensor_slices((columns, y))
stop = keras.callbacks.EarlyStopping(monitor="val_auc", mode="max", patience=1)
history = model.fit(
    ds.take(64).shuffle(64).batch(8),
    validation_data=ds.skip(64).batch(8),
    epochs=3,
    verbose=0,
    callbacks=[stop, *kd.defaults(folder / "run", save_freq=4)],
)
