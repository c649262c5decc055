"""An existing script, and the one line that makes it fault-tolerant.

    python examples/plain_fit.py                    # kill it, or press Ctrl-C, whenever you like
    python examples/plain_fit.py                    # the same command resumes where it stopped
    python examples/plain_fit.py --epochs 15        # finished? It continues to the 15th epoch

trains a small network on handwritten digits. Everything except the argument `callbacks` of `fit` is
plain Keras. List its checkpoints with `keras-distplug ls runs/plain_fit`.
"""

from __future__ import annotations

import argparse

import digits
import keras

import keras_distplug as kd


def main(directory: str, epochs: int) -> None:
    keras.utils.set_random_seed(7)
    (x_train, y_train), (x_test, y_test) = digits.load()
    model = keras.Sequential(
        [
            keras.Input(x_train.shape[1:]),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(0.005),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(
        x_train,
        y_train,
        batch_size=64,
        epochs=epochs,
        validation_data=(x_test, y_test),
        callbacks=kd.defaults(directory),  # the line
    )
    # It includes the epochs of earlier starts.
    accuracy = history.history["val_accuracy"]
    print(f"validation accuracy {accuracy[-1]:.4f} after {len(accuracy)} epochs", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", default="runs/plain_fit", help="a folder, or a URL")
    parser.add_argument("--epochs", type=int, default=10, help="in total, over all starts")
    arguments = parser.parse_args()
    main(arguments.directory, arguments.epochs)
