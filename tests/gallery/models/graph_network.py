"""A graph network: sparse features as input, messages along edges that the model holds"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)


class GraphConvolution(keras.layers.Layer):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.prepare = keras.layers.Dense(units, activation="gelu")
        self.update = keras.layers.Dense(units, activation="gelu")

    def call(self, inputs):
        features, edges, weights = inputs
        messages = self.prepare(tf.gather(features, edges[1])) * weights[:, None]
        received = tf.math.unsorted_segment_sum(messages, edges[0], tf.shape(features)[0])
        return tf.nn.l2_normalize(self.update(tf.concat([features, received], axis=1)), axis=-1)


class NodeClassifier(keras.Model):
    def __init__(self, node_features, edges, weights):
        super().__init__()
        self.node_features = node_features
        self.edges = edges
        self.edge_weights = weights / tf.reduce_sum(weights)
        self.preprocess = keras.layers.Dense(8, activation="gelu")
        self.convolutions = [GraphConvolution(8) for _ in range(2)]
        self.bag = keras.layers.Dense(8)
        self.logits = keras.layers.Dense(3)

    def call(self, inputs):
        nodes, words = inputs
        h = self.preprocess(self.node_features)
        for convolution in self.convolutions:
            h = convolution((h, self.edges, self.edge_weights)) + h
        return self.logits(tf.gather(h, tf.squeeze(nodes, -1)) + self.bag(words))


rng = np.random.default_rng(0)
features = tf.constant(rng.normal(size=(64, 5)).astype("float32"))
edges, weights = rng.integers(0, 64, (2, 200)), tf.ones([200])
words = tf.sparse.from_dense((rng.random((64, 30)) < 0.1).astype("float32"))
nodes, y = np.arange(64)[:, None], rng.integers(0, 3, 64)
train = tf.data.Dataset.from_tensor_slices(((nodes, words), y)).shuffle(64).batch(8)
model = NodeClassifier(features, edges, weights)
model.compile(
    optimizer=keras.optimizers.Adam(0.01),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=[keras.metrics.SparseCategoricalAccuracy(name="acc")],
)
history = model.fit(train, epochs=3, verbose=0, callbacks=kd.defaults(folder / "run", save_freq=4))
