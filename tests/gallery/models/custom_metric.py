"""Custom metrics: a confusion matrix with a value per class, a function, a stateful F1"""

import sys
from pathlib import Path

import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)


class ClassAccuracies(keras.metrics.Metric):
    def __init__(self, classes, name="class_accuracies", **kwargs):
        super().__init__(name=name, **kwargs)
        self.classes = classes
        self.matrix = self.add_weight(shape=(classes, classes), initializer="zeros", name="matrix")

    def update_state(self, y_true, y_pred, sample_weight=None):
        true = keras.ops.one_hot(keras.ops.reshape(y_true, (-1,)), self.classes)
        predicted = keras.ops.one_hot(keras.ops.argmax(y_pred, -1), self.classes)
        self.matrix.assign_add(keras.ops.matmul(keras.ops.transpose(true), predicted))

    def result(self):
        return keras.ops.diagonal(self.matrix) / (keras.ops.sum(self.matrix, 1) + 1e-6)

    def reset_state(self):
        self.matrix.assign(keras.ops.zeros((self.classes, self.classes)))


def confidence(y_true, y_pred):
    return keras.ops.max(y_pred, axis=-1)


rng = np.random.default_rng(0)
x, y = rng.normal(size=(80, 4)).astype("float32"), rng.integers(0, 3, (80, 1))
model = keras.Sequential(
    [keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3, "softmax")]
)
model.compile(
    optimizer=keras.optimizers.RMSprop(learning_rate=1e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(),
    metrics=[ClassAccuracies(3), confidence, keras.metrics.SparseCategoricalAccuracy()],
)
history = model.fit(
    x,
    y,
    batch_size=8,
    epochs=3,
    validation_split=0.2,
    verbose=0,
    callbacks=kd.defaults(folder / "run", save_freq=4),
)
