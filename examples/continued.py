"""A multi-layer perceptron is trained for some epochs, and another day for some more.

    python examples/continued.py --epochs 5
    python examples/continued.py --epochs 10           # goes on behind epoch 5
    python examples/continued.py --epochs 10           # there is nothing left to do

A checkpoint is made behind each epoch, and the newest is taken up. The checksum in the end is that
of weights and optimizer. It is the same, to the bit, as where all is done at once:

    python examples/continued.py --epochs 10 --directory runs/at-once
"""

from __future__ import annotations

import argparse
import hashlib

import digits
import keras

import keras_distplug as kd

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--directory", default="runs/continued", help="of the run; or s3://bucket/...")
parser.add_argument("--epochs", type=int, default=5, help="at which training ends, of all times")
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

for epoch, accuracy in enumerate(history.history["val_accuracy"], 1):  # all times', not this one's
    print(f"epoch {epoch}: validation accuracy {accuracy:.4f}")
_, accuracy = model.evaluate(x_test, y_test, verbose=0)
checksum = hashlib.sha256()
for variable in [*model.variables, *model.optimizer.variables]:
    checksum.update(variable.numpy().tobytes())
print(f"test accuracy {accuracy:.4f}, sha256 {checksum.hexdigest()}")
