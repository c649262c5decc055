"""Measures something in every training step, without a change to the model.

    python examples/gradient_norms.py

trains a small network on handwritten digits on two replicas, and prints after every epoch the
largest gradient norm of every replica before the gradients were summed. The callback adds a
`StepInstrument` to the step; the weights are bit for bit those of a training without it.
"""

from __future__ import annotations

import argparse

import digits
import keras
import tensorflow as tf

import keras_distplug as kd


class LargestNorm(kd.StepInstrument):
    """Keeps the largest gradient norm of every replica."""

    def __init__(self):
        self.largest = {}

    def after_gradients(self, step, optimizer, gradients):
        step.carried["norm"] = step.norm(gradients)
        return gradients

    def after(self, step, logs):
        tf.numpy_function(self._note, [step.replica, step.carried["norm"]], [])

    def _note(self, replica, norm):
        self.largest[int(replica)] = max(self.largest.get(int(replica), 0.0), float(norm))

    def take(self):
        taken, self.largest = self.largest, {}
        return sorted(taken.items())


class PrintNorms(keras.callbacks.Callback):
    def set_model(self, model):
        super().set_model(model)
        self.norms = LargestNorm()
        kd.instrument_step(model, self.norms)

    def on_epoch_end(self, epoch, logs=None):
        for replica, norm in self.norms.take():
            print(f"epoch {epoch + 1}, replica {replica}: largest gradient norm {norm:.3f}")

    def state_dict(self):
        return {}  # nothing to save: every epoch starts with no norms

    def load_state_dict(self, state):
        pass


parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--directory", default="runs/gradient_norms", help="a folder, or a URL")
parser.add_argument("--epochs", type=int, default=5)
arguments = parser.parse_args()

if not tf.config.list_physical_devices("GPU"):
    cpu = tf.config.list_physical_devices("CPU")[0]
    half = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [half, half])

keras.utils.set_random_seed(7)
strategy = kd.init("mirrored")
(x_train, y_train), test = digits.load()
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input(x_train.shape[1:]),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
model.fit(
    x_train,
    y_train,
    batch_size=kd.global_batch(16, strategy),
    epochs=arguments.epochs,
    verbose=0,
    callbacks=[*kd.defaults(arguments.directory), PrintNorms()],
)
loss, accuracy = model.evaluate(*test, verbose=0)
print(f"{strategy.num_replicas_in_sync} replicas, validation accuracy {accuracy:.4f}")
