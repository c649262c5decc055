"""Text generation: causal attention, an output without a loss, a callback that samples"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)
WORDS, LENGTH = 30, 10


class TransformerBlock(keras.layers.Layer):
    def __init__(self, size, heads, rate=0.1):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(heads, size)
        self.ffn = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(size)])
        self.norms = [keras.layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.dropouts = [keras.layers.Dropout(rate) for _ in range(2)]

    def call(self, inputs):
        attended = self.attention(inputs, inputs, use_causal_mask=True)
        h = self.norms[0](inputs + self.dropouts[0](attended))
        return self.norms[1](h + self.dropouts[1](self.ffn(h)))


class TextGenerator(keras.callbacks.Callback):
    def __init__(self, start, print_every=1):
        super().__init__()
        self.start = start
        self.print_every = print_every
        self.texts = []

    def on_epoch_end(self, epoch, logs=None):
        tokens = list(self.start)
        while len(tokens) < LENGTH:
            padded = np.array([tokens + [0] * (LENGTH - len(tokens))])
            words, _ = self.model.predict(padded, verbose=0)
            likely = np.exp(words[0, len(tokens) - 1])
            tokens.append(np.random.choice(WORDS, p=likely / likely.sum()))
        self.texts.append(tokens)


texts = np.random.default_rng(0).integers(1, WORDS, (64, LENGTH + 1))
train = tf.data.Dataset.from_tensor_slices(texts).shuffle(256).batch(8)
train = train.map(lambda text: (text[:, :-1], text[:, 1:]), num_parallel_calls=tf.data.AUTOTUNE)
inputs = keras.Input((LENGTH,), dtype="int32")
h = keras.layers.Embedding(WORDS, 8)(inputs)
h = TransformerBlock(8, 2)(h + keras.layers.Embedding(LENGTH, 8)(keras.ops.arange(LENGTH)))
model = keras.Model(inputs, [keras.layers.Dense(WORDS)(h), h])
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("adam", loss=[loss_fn, None])
history = model.fit(
    train.prefetch(tf.data.AUTOTUNE),
    epochs=3,
    verbose=0,
    callbacks=[TextGenerator([1, 2, 3]), *kd.defaults(folder / "run", save_freq=4)],
)
