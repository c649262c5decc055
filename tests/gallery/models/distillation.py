"""Distillation: a teacher trained first, `compute_loss` overridden, other arguments of `compile`"""

import sys
from pathlib import Path

import keras
import numpy as np

import keras_distplug as kd

folder = Path(sys.argv[1])
keras.utils.set_random_seed(1)


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.teacher = teacher
        self.student = student

    def compile(
        self, optimizer, metrics, student_loss_fn, distillation_loss_fn, alpha=0.1, temperature=3
    ):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha = alpha
        self.temperature = temperature

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False):
        teacher = self.teacher(x, training=False)
        distillation_loss = self.distillation_loss_fn(
            keras.ops.softmax(teacher / self.temperature, axis=1),
            keras.ops.softmax(y_pred / self.temperature, axis=1),
        ) * (self.temperature**2)
        return self.alpha * self.student_loss_fn(y, y_pred) + (1 - self.alpha) * distillation_loss

    def call(self, x):
        return self.student(x)


def classifier(filters, name):
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(filters, 3, strides=2, padding="same"),
            keras.layers.LeakyReLU(negative_slope=0.2),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(3),
        ],
        name=name,
    )


rng = np.random.default_rng(0)
x, y = rng.random((64, 8, 8, 1), "float32"), rng.integers(0, 3, 64)
teacher = classifier(8, "teacher")
crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
teacher.compile(keras.optimizers.Adam(), crossentropy)
teacher.fit(x, y, batch_size=8, epochs=2, verbose=0)
model = Distiller(student=classifier(4, "student"), teacher=teacher)
model.compile(
    optimizer=keras.optimizers.Adam(),
    metrics=[keras.metrics.SparseCategoricalAccuracy()],
    student_loss_fn=crossentropy,
    distillation_loss_fn=keras.losses.KLDivergence(),
)
history = model.fit(
    x,
    y,
    batch_size=8,
    epochs=3,
    verbose=0,
    callbacks=kd.defaults(folder / "run", save_freq=4),
)
