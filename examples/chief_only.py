"""Several workers train with Keras' own `ModelCheckpoint` and `load_model`; one writes the files.

    keras-distplug run --workers 2 -- python examples/chief_only.py --epochs 5
    keras-distplug run --workers 2 -- python examples/chief_only.py --epochs 10    # goes on

`chief_only` leaves the files of a callback to the first worker. `load_model` inside the scope makes
a model of all workers. A `.keras` file of each epoch stays. Should a worker die in mid-epoch, it
goes on from the checkpoints of `BackupAndRestore`, which are deleted when training has ended;
`keras-distplug run` needs that callback to know that it has. Where no `.keras` files are wanted,
`examples/continued.py` is simpler.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import digits
import keras

import keras_distplug as kd

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--directory", type=Path, default="runs/chief_only", help="that all can read")
parser.add_argument("--epochs", type=int, default=5, help="at which training ends, of all times")
arguments = parser.parse_args()
directory = arguments.directory

strategy = kd.init()  # joins the other workers, before the first tensor
is_chief = strategy.cluster_resolver is None or strategy.cluster_resolver.task_id == 0
keras.utils.set_random_seed(7)
(x_train, y_train), (x_test, y_test) = digits.load()


def build() -> keras.Model:
    # A Sequential one names its variables otherwise when it is made by `load_model`, and so
    # `BackupAndRestore` takes it for another model.
    pictures = keras.Input(x_train.shape[1:])
    x = keras.layers.Flatten()(pictures)
    x = keras.layers.Dense(256, activation="relu")(x)
    x = keras.layers.Dense(256, activation="relu")(x)
    model = keras.Model(pictures, keras.layers.Dense(10)(x))
    model.compile(
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


# All workers find the same file: the next is written behind an epoch, which takes all of them.
newest = max(directory.glob("epoch-*.keras"), default=None)
with strategy.scope():
    model = build() if newest is None else keras.models.load_model(newest)
begin = 0 if newest is None else int(newest.stem.removeprefix("epoch-"))
if is_chief:
    print(f"begins behind epoch {begin}: {newest or 'there is no file yet'}")

model.fit(
    x_train,
    y_train,
    batch_size=64,  # of both workers together
    initial_epoch=begin,
    epochs=arguments.epochs,
    validation_split=0.2,
    verbose=2 if is_chief else 0,
    callbacks=[
        kd.chief_only(keras.callbacks.ModelCheckpoint(directory / "epoch-{epoch:03d}.keras")),
        kd.BackupAndRestore(directory / "backup"),
    ],
)
_, accuracy = model.evaluate(x_test, y_test, verbose=0)  # takes all workers, too
if is_chief:
    print(f"test accuracy {accuracy:.4f}")
