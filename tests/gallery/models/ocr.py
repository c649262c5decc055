"""Text in images: an endpoint layer that calls `add_loss`, labels as an input"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)


class CTCLayer(keras.layers.Layer):
    def call(self, y_true, y_pred):
        batch = tf.shape(y_true)[0]
        steps, letters = tf.shape(y_pred)[1], tf.shape(y_true)[1]
        lengths = tf.fill([batch], letters), tf.fill([batch], steps)
        self.add_loss(tf.reduce_mean(keras.ops.ctc_loss(y_true, y_pred, *lengths, mask_index=0)))
        return y_pred


rng = np.random.default_rng(0)
x = rng.random((80, 16, 8, 1), "float32")
y = rng.integers(1, 5, (80, 3)).astype("int32")
images, labels = keras.Input((16, 8, 1), name="image"), keras.Input((3,), name="label")
h = keras.layers.Conv2D(4, 3, activation="relu", padding="same")(images)
h = keras.layers.Reshape((8, -1))(keras.layers.MaxPooling2D(2)(h))
h = keras.layers.Dropout(0.2)(keras.layers.Dense(8, activation="relu")(h))
h = keras.layers.Bidirectional(keras.layers.LSTM(4, return_sequences=True, dropout=0.25))(h)
model = keras.Model([images, labels], CTCLayer()(labels, keras.layers.Dense(5)(h)))
model.compile(optimizer=keras.optimizers.Adam())
train = tf.data.Dataset.from_tensor_slices({"image": x[:64], "label": y[:64]}).batch(8)
val = tf.data.Dataset.from_tensor_slices({"image": x[64:], "label": y[64:]}).batch(8)
stop = keras.callbacks.EarlyStopping(monitor="val_loss", patience=2, restore_best_weights=True)
history = model.fit(
    train,
    validation_data=val,
    epochs=3,
    verbose=0,
    callbacks=[stop, *kd.defaults(folder / "run", save_freq=4)],
)
