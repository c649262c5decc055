"""A residual network (18 layers, 11 million weights) learns to read digits, under any strategy.

    python examples/residual.py --strategy mirrored
    python examples/residual.py --strategy central_storage
    keras-distplug run --workers 2 -- python examples/residual.py --strategy multi_worker
    keras-distplug run --workers 2 --ps 1 -- python examples/residual.py --strategy parameter_server

The model is built as usual; `distributed_fit` places it and splits the data. Pictures are enlarged
to 32 x 32. On GPUs, you can use the 224 x 224 that such networks are designed for. On processors
where TensorFlow disables oneDNN, TF_ENABLE_ONEDNN_OPTS=1 makes convolutions several times faster.
"""

from __future__ import annotations

import argparse

import digits
import keras
import tensorflow as tf
from keras import layers

import keras_distplug as kd

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
STRATEGIES = ("mirrored", "multi_worker", "central_storage", "parameter_server")
parser.add_argument("--strategy", choices=STRATEGIES, required=True)
parser.add_argument("--directory", help="defaults to runs/residual-<strategy>")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--samples", type=int, default=1200, help="maximum number for training")
parser.add_argument("--size", type=int, default=32, help="width of a picture in pixels")
arguments = parser.parse_args()


def block(x, filters, strides):
    """Builds two convolutions and a shortcut around them."""
    way = x
    if strides > 1:
        way = layers.Conv2D(filters, 1, strides, use_bias=False)(x)
        way = layers.BatchNormalization(momentum=0.9)(way)
    x = layers.Conv2D(filters, 3, strides, padding="same", use_bias=False)(x)
    x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
    x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    return layers.ReLU()(layers.add([x, way]))


def residual_network(shape):
    pictures = keras.Input(shape)
    x = layers.Resizing(arguments.size, arguments.size)(pictures)
    x = layers.Conv2D(64, 7, strides=2, padding="same", use_bias=False)(x)
    x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
    x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
    for filters in (64, 128, 256, 512):
        x = block(x, filters, strides=1 if filters == 64 else 2)
        x = block(x, filters, strides=1)
    return keras.Model(pictures, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


alone = arguments.strategy in ("mirrored", "central_storage")
if alone and not tf.config.list_physical_devices("GPU"):
    # Only for this example: two replicas on a machine without GPUs. Omit this in your script.
    cpu = tf.config.list_physical_devices("CPU")[0]
    half = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [half, half])

kd.init(arguments.strategy)  # parameter servers and their workers serve from here on
keras.utils.set_random_seed(7)
(x_train, y_train), (x_test, y_test) = digits.load()
x_train, y_train = x_train[: arguments.samples], y_train[: arguments.samples]

model = residual_network(x_train.shape[1:])
model.compile(
    optimizer=keras.optimizers.Adam(5e-4),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = kd.distributed_fit(
    model,
    x_train,
    y_train,
    batch_size=32,  # over all replicas; with parameter servers, per worker
    epochs=arguments.epochs,
    verbose=2,
    strategy=arguments.strategy,
    directory=arguments.directory or f"runs/residual-{arguments.strategy}",
)
_, accuracy = model.evaluate(x_test[:1000], y_test[:1000], verbose=0)
print(f"{arguments.strategy}: test accuracy {accuracy:.4f}")
