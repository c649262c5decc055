"""A TabTransformer: attention over embedded columns, sample weights, an encoder per column"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
sizes = {"color": 4, "shape": 3, "origin": 5}
columns = {name: rng.integers(0, size, 64) for name, size in sizes.items()}
columns["price"] = rng.normal(size=64).astype("float32")
y, weights = rng.integers(0, 2, 64).astype("float32"), rng.random(64, "float32")
train = tf.data.Dataset.from_tensor_slices((columns, y, weights))
train = train.shuffle(64).batch(8).map(lambda x, y, w: (x, y[:, None], w[:, None])).cache()
inputs = {name: keras.Input((), name=name, dtype="int32") for name in sizes}
inputs["price"] = keras.Input((), name="price")
encoded = [keras.layers.Embedding(size, 8)(inputs[name]) for name, size in sizes.items()]
encoded = keras.ops.stack(encoded, axis=1)
encoded += keras.layers.Embedding(len(sizes), 8)(keras.ops.arange(len(sizes)))
for block in range(2):
    attended = keras.layers.MultiHeadAttention(2, 8, dropout=0.1, name=f"attention_{block}")(
        encoded, encoded
    )
    h = keras.layers.LayerNormalization(epsilon=1e-6)(keras.layers.Add()([attended, encoded]))
    fed = keras.layers.Dropout(0.2)(keras.layers.Dense(8, activation="gelu")(h))
    encoded = keras.layers.LayerNormalization(epsilon=1e-6)(keras.layers.Add()([fed, h]))
numeric = keras.layers.LayerNormalization()(keras.ops.expand_dims(inputs["price"], -1))
features = keras.layers.concatenate([keras.layers.Flatten()(encoded), numeric])
h = keras.layers.Dense(8, activation="selu")(keras.layers.BatchNormalization()(features))
model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(h))
model.compile(
    optimizer=keras.optimizers.AdamW(learning_rate=0.001, weight_decay=0.0001),
    loss=keras.losses.BinaryCrossentropy(),
    metrics=[keras.metrics.BinaryAccuracy(name="accuracy")],
)
history = model.fit(train, epochs=3, verbose=0, callbacks=kd.defaults(folder / "run", save_freq=4))
