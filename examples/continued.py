"""A multi-layer perceptron is trained for some epochs, and another day for some more.

    python examples/continued.py --epochs 5
    python examples/continued.py --epochs 10           # continues after epoch 5
    python examples/continued.py --epochs 10           # there is nothing left to do

A checkpoint is saved after every epoch, and training resumes from the newest one. The checksum at
the end is that of weights and optimizer. It is the same as after ten epochs without interruption:

    python examples/continued.py --epochs 10 --directory runs/uninterrupted
"""

from __future__ import annotations

import argparse
import hashlib

import digits
import keras

import keras_distplug as kd

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument(
    "--directory", default="runs/continued", help="a folder, or a URL: s3://bucket/..."
)
parser.add_argument("--epochs", type=int, default=5, help="in total, over all starts")
arguments = parser.parse_args()

keras.utils.set_random_seed(7)
(x_train, y_train), (x_test, y_test) = digits.load()

model = keras.Sequential(
    [
        keras.Input(x_train.shape[1:]),
        keras.layers.Flatten(),
        keras.layers.Dense(256, activation="relu"),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(256, activation="relu"),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(10),
    ]
)
model.compile(
    optimizer="adam",
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = kd.distributed_fit(
    model,
    x_train,
    y_train,
    epochs=arguments.epochs,
    validation_split=0.2,
    verbose=2,
    directory=arguments.directory,
)

for epoch, accuracy in enumerate(history.history["val_accuracy"], 1):  # of all starts
    print(f"epoch {epoch}: validation accuracy {accuracy:.4f}")
_, accuracy = model.evaluate(x_test, y_test, verbose=0)
checksum = hashlib.sha256()
for variable in [*model.variables, *model.optimizer.variables]:
    checksum.update(variable.numpy().tobytes())
print(f"test accuracy {accuracy:.4f}, sha256 {checksum.hexdigest()}")
