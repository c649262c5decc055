"""A model on two devices, placed with `tf.device`: each one holds a part of it.

    python examples/two_devices.py                  # kill it, or press Ctrl-C, whenever you like
    python examples/two_devices.py                  # the same command resumes where it stopped

trains a small network on handwritten digits. The first device has the wide branch, the second one
the narrow branch and the classifier. With two GPUs, these are GPU:0 and GPU:1, otherwise two
logical CPU devices. A resumed run has its weights and optimizer slots on the same devices.
"""

from __future__ import annotations

import argparse

import digits
import keras
import tensorflow as tf

import keras_distplug as kd


class On(keras.layers.Layer):
    """A layer that keeps its weights and computes on a given device."""

    def __init__(self, device: str, layer: keras.layers.Layer) -> None:
        super().__init__()
        self.device, self.layer = device, layer

    def build(self, shape: tuple[int, ...]) -> None:
        with tf.device(self.device):
            self.layer.build(shape)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        with tf.device(self.device):
            return self.layer(inputs)


def two_devices() -> tuple[str, str]:
    if len(tf.config.list_physical_devices("GPU")) >= 2:
        return "GPU:0", "GPU:1"
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return "CPU:0", "CPU:1"


def main(directory: str, epochs: int) -> None:
    first, second = two_devices()
    keras.utils.set_random_seed(7)
    (x_train, y_train), (x_test, y_test) = digits.load()

    pictures = keras.Input(x_train.shape[1:])
    flat = keras.layers.Flatten()(pictures)
    wide = On(first, keras.layers.Dense(128, activation="relu"))(flat)
    narrow = On(second, keras.layers.Dense(32, activation="tanh"))(flat)
    both = keras.layers.Dropout(0.2)(keras.layers.Concatenate()([wide, narrow]))
    model = keras.Model(pictures, On(second, keras.layers.Dense(10))(both))

    model.compile(
        optimizer=keras.optimizers.Adam(0.002),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(
        x_train,
        y_train,
        batch_size=64,
        epochs=epochs,
        validation_data=(x_test, y_test),
        callbacks=kd.defaults(directory),
    )
    for variable in model.trainable_variables:
        print(f"{variable.path}: {variable.value.device.rpartition('device:')[2]}")
    accuracy = history.history["val_accuracy"]
    print(f"validation accuracy {accuracy[-1]:.4f} after {len(accuracy)} epochs", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", default="runs/two_devices", help="a folder, or a URL")
    parser.add_argument("--epochs", type=int, default=10, help="in total, over all starts")
    arguments = parser.parse_args()
    main(arguments.directory, arguments.epochs)
