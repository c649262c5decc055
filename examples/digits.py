"""The data of the examples beside this file: pictures of handwritten digits, and which they are.

    (x_train, y_train), (x_test, y_test) = digits.load()

MNIST if Keras has it on this machine already (60,000 pictures of 28 x 28; put it there with
`python -c "import keras; keras.datasets.mnist.load_data()"`), and else the 1,797 of 8 x 8 that
scikit-learn brings. Nothing is downloaded. A script of your own has its own data in this place.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

Pictures = tuple[np.ndarray, np.ndarray]


def load() -> tuple[Pictures, Pictures]:
    """Pictures as float32 from 0 to 1, of shape (samples, height, width, 1), and labels 0 to 9."""
    mnist = _where_keras_keeps("mnist.npz")
    if mnist.exists():
        with np.load(mnist) as kept:
            arrays = [kept[name] for name in ("x_train", "y_train", "x_test", "y_test")]
        x_train, y_train, x_test, y_test = arrays
        brightest = 255
    else:
        from sklearn.datasets import load_digits

        data = load_digits()
        x_train, x_test = np.split(data.images, [1500])
        y_train, y_test = np.split(data.target, [1500])
        brightest = 16
    x_train, x_test = (x[..., None].astype("float32") / brightest for x in (x_train, x_test))
    return (x_train, y_train.astype("int64")), (x_test, y_test.astype("int64"))


def _where_keras_keeps(name: str) -> Path:
    home = Path(os.environ.get("KERAS_HOME", "~/.keras")).expanduser()
    if not os.access(home, os.W_OK):
        home = Path("/tmp/.keras")  # as `keras.utils.get_file` does
    return home / "datasets" / name
