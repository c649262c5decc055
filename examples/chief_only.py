"""Several workers train with Keras' own `ModelCheckpoint` and `load_model`; one writes the files.

    keras-distplug run --workers 2 -- python examples/chief_only.py --epochs 5
    keras-distplug run --workers 2 -- python examples/chief_only.py --epochs 10    # continues

With `chief_only`, only the first worker writes a callback's files. `load_model` inside the scope
creates a model on all workers. The `.keras` files of all epochs are kept. If a worker dies
mid-epoch, training resumes from the checkpoints of `BackupAndRestore`, which are deleted when
training has finished; `keras-distplug run` needs that callback to detect this. If you do not need
`.keras` files, `examples/continued.py` is simpler.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import digits
import keras

import keras_distplug as kd

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument(
    "--directory", type=Path, default="runs/chief_only", help="a folder that all workers share"
)
parser.add_argument("--epochs", type=int, default=5, help="in total, over all starts")
arguments = parser.parse_args()
directory = arguments.directory

strategy = kd.init()  # joins the other workers, before the first tensor
is_chief = strategy.cluster_resolver is None or strategy.cluster_resolver.task_id == 0
keras.utils.set_random_seed(7)
(x_train, y_train), (x_test, y_test) = digits.load()


def build() -> keras.Model:
    # Not a Sequential model: `load_model` names the variables of one differently, so that
    # `BackupAndRestore` would take it for another model.
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


# All workers find the same file: the next one is written after an epoch in which all take part.
newest = max(directory.glob("epoch-*.keras"), default=None)
with strategy.scope():
    model = build() if newest is None else keras.models.load_model(newest)
begin = 0 if newest is None else int(newest.stem.removeprefix("epoch-"))
if is_chief:
    print(f"starting after epoch {begin}: {newest or 'no file exists yet'}")

model.fit(
    x_train,
    y_train,
    batch_size=64,  # over both workers
    initial_epoch=begin,
    epochs=arguments.epochs,
    validation_split=0.2,
    verbose=2 if is_chief else 0,
    callbacks=[
        kd.chief_only(keras.callbacks.ModelCheckpoint(directory / "epoch-{epoch:03d}.keras")),
        kd.BackupAndRestore(directory / "backup"),
    ],
)
_, accuracy = model.evaluate(x_test, y_test, verbose=0)  # runs on all workers, too
if is_chief:
    print(f"test accuracy {accuracy:.4f}")
