"""A two-tower recommender: in-batch negatives, Adagrad, top-k metrics in `test_step`"""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)


class Retrieval(keras.Model):
    def __init__(self, users, movies):
        super().__init__()
        self.query_tower = keras.Sequential(
            [keras.layers.Embedding(users, 8), keras.layers.Dense(4)]
        )
        self.candidate_tower = keras.Sequential(
            [keras.layers.Embedding(movies, 8), keras.layers.Dense(4)]
        )
        self.loss_fn = keras.losses.CategoricalCrossentropy(from_logits=True, reduction="sum")
        self.top_k = keras.metrics.TopKCategoricalAccuracy(k=3, name="top_3")
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def scores(self, features):
        queries = self.query_tower(features["user"])
        candidates = self.candidate_tower(features["movie"])
        scores = tf.matmul(queries, candidates, transpose_b=True)
        return tf.eye(tf.shape(scores)[0]), scores

    def train_step(self, features):
        with tf.GradientTape() as tape:
            labels, scores = self.scores(features)
            loss = self.loss_fn(labels, scores) + sum(self.losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.loss_tracker.update_state(loss)
        self.top_k.update_state(labels, scores)
        return {"loss": self.loss_tracker.result(), "top_3": self.top_k.result()}

    def test_step(self, features):
        labels, scores = self.scores(features)
        self.loss_tracker.update_state(self.loss_fn(labels, scores))
        self.top_k.update_state(labels, scores)
        return {metric.name: metric.result() for metric in self.metrics}


rng = np.random.default_rng(0)
ratings = {"user": rng.integers(0, 20, 80), "movie": rng.integers(0, 30, 80)}
ratings = tf.data.Dataset.from_tensor_slices(ratings)
ratings = ratings.shuffle(80, seed=42, reshuffle_each_iteration=False)
model = Retrieval(users=20, movies=30)
model.compile(optimizer=keras.optimizers.Adagrad(learning_rate=0.1))
history = model.fit(
    ratings.take(64).shuffle(64).batch(8).cache(),
    validation_data=ratings.skip(64).batch(8).cache(),
    epochs=3,
    verbose=0,
    callbacks=kd.defaults(folder / "run", save_freq=4),
)
