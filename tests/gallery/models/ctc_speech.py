"""Speech recognition with a CTC loss function, padded batches, decoded samples after every epoch"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)


def ctc_loss(y_true, y_pred):
    batch, steps = tf.shape(y_pred)[0], tf.shape(y_pred)[1]
    lengths = tf.reduce_sum(tf.cast(y_true > 0, tf.int32), axis=1)
    return keras.ops.ctc_loss(y_true, y_pred, lengths, tf.fill([batch], steps), mask_index=0)


class Decoded(keras.callbacks.Callback):
    def __init__(self, dataset):
        super().__init__()
        self.dataset = dataset

    def on_epoch_end(self, epoch, logs=None):
        for spectrograms, _ in self.dataset:
            predicted = self.model.predict(spectrograms, verbose=0)
            lengths = np.full(len(predicted), predicted.shape[1])
            keras.ops.ctc_decode(predicted, lengths, strategy="greedy", mask_index=0)


rng = np.random.default_rng(0)
sounds = tf.ragged.constant(
    [rng.normal(size=(n, 6)).tolist() for n in rng.integers(12, 20, 72)], inner_shape=(6,)
)
texts = tf.ragged.constant([rng.integers(1, 5, n).tolist() for n in rng.integers(2, 5, 72)])
ds = tf.data.Dataset.from_tensor_slices((tf.cast(sounds, tf.float32), texts))
ds = ds.map(lambda sound, text: (tf.sqrt(tf.abs(sound)), text), num_parallel_calls=tf.data.AUTOTUNE)
train = ds.take(64).shuffle(64).padded_batch(8).prefetch(tf.data.AUTOTUNE)
val = ds.skip(64).padded_batch(8)
inputs = keras.Input((None, 6))
h = keras.layers.Conv1D(8, 3, strides=2, padding="same", use_bias=False)(inputs)
h = keras.layers.ReLU()(keras.layers.BatchNormalization()(h))
h = keras.layers.Bidirectional(keras.layers.GRU(4, return_sequences=True, reset_after=True))(h)
model = keras.Model(inputs, keras.layers.Dense(5)(keras.layers.Dropout(0.5)(h)))
model.compile(optimizer=keras.optimizers.Adam(1e-2), loss=ctc_loss)
history = model.fit(
    train,
    validation_data=val,
    epochs=3,
    verbose=0,
    callbacks=[Decoded(val), *kd.defaults(folder / "run", save_freq=4)],
)
