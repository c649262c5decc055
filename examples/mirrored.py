"""A convolutional network learns to read digits on all devices of one machine.

    python examples/mirrored.py

is an ordinary script with `MirroredStrategy`, except for one line: the callbacks of `fit`. Every
GPU has a copy of the model and processes its part of every batch. Without a GPU, the CPU counts as
two devices. Kill it and start it again: it resumes where it stopped.
"""

from __future__ import annotations

import argparse

import digits
import keras
import tensorflow as tf

import keras_distplug as kd

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument(
    "--directory", default="runs/mirrored", help="a folder, or a URL: s3://bucket/..."
)
parser.add_argument("--epochs", type=int, default=5)
arguments = parser.parse_args()

if not tf.config.list_physical_devices("GPU"):
    # Only for this example: two replicas on a machine without GPUs. Omit this in your script.
    cpu = tf.config.list_physical_devices("CPU")[0]
    half = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [half, half])

keras.utils.set_random_seed(7)
strategy = kd.init("mirrored")
(x_train, y_train), (x_test, y_test) = digits.load()

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input(x_train.shape[1:]),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(kd.scaled_learning_rate(0.001, strategy)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

model.fit(
    x_train,
    y_train,
    batch_size=kd.global_batch(16, strategy),  # 16 per replica
    epochs=arguments.epochs,
    verbose=2,
    callbacks=kd.defaults(arguments.directory),  # the one line
)
loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(f"{strategy.num_replicas_in_sync} replicas, test accuracy {accuracy:.4f}")
