"""A masked language model: a loss and a metric of the module, a callback that predicts"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)
WORDS, LENGTH, MASK = 40, 12, 39
loss_fn = keras.losses.SparseCategoricalCrossentropy(reduction=None)
loss_tracker = keras.metrics.Mean(name="loss")


class MaskedLanguageModel(keras.Model):
    def train_step(self, inputs):
        features, labels, sample_weight = inputs
        with tf.GradientTape() as tape:
            predictions = self(features, training=True)
            loss = loss_fn(labels, predictions, sample_weight=sample_weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        loss_tracker.update_state(loss, sample_weight=sample_weight)
        return {"loss": loss_tracker.result()}

    @property
    def metrics(self):
        return [loss_tracker]


class MaskedTextGenerator(keras.callbacks.Callback):
    def __init__(self, tokens, top_k=3):
        super().__init__()
        self.tokens = tokens
        self.k = top_k

    def on_epoch_end(self, epoch, logs=None):
        prediction = self.model.predict(self.tokens, verbose=0)
        self.likely = prediction[0, 3].argsort()[-self.k :]


def masked(texts, rng):
    is_masked = rng.random(texts.shape) < 0.15
    inputs = np.where(is_masked & (rng.random(texts.shape) < 0.9), MASK, texts)
    return inputs, texts, is_masked.astype("float32")


rng = np.random.default_rng(0)
features = masked(rng.integers(1, WORDS - 1, (64, LENGTH)), rng)
train = tf.data.Dataset.from_tensor_slices(features).shuffle(1000).batch(8)
inputs = keras.Input((LENGTH,), dtype="int64")
h = keras.layers.Embedding(WORDS, 8, name="word_embedding")(inputs)
h = h + keras.layers.Embedding(LENGTH, 8)(keras.ops.arange(LENGTH))
h = keras.layers.LayerNormalization()(h + keras.layers.MultiHeadAttention(2, 4, dropout=0.1)(h, h))
outputs = keras.layers.Dense(WORDS, activation="softmax")(h)
model = MaskedLanguageModel(inputs, outputs, name="masked_bert_model")
model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.01))
generator = MaskedTextGenerator(features[0][:1])
history = model.fit(
    train,
    epochs=3,
    verbose=0,
    callbacks=[generator, *kd.defaults(folder / "run", save_freq=4)],
)
