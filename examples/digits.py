"""The data for the other examples in this folder: pictures of handwritten digits with labels.

    (x_train, y_train), (x_test, y_test) = digits.load()

This is MNIST if Keras has already downloaded it (60,000 pictures of 28 x 28; download it with
`python -c "import keras; keras.datasets.mnist.load_data()"`), otherwise the 1,797 pictures of 8 x 8
that are part of scikit-learn. Nothing is downloaded. In your own script, use your data instead.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

Pictures = tuple[np.ndarray, np.ndarray]


def load() -> tuple[Pictures, Pictures]:
    """Returns pictures of shape (samples, height, width, 1), as float32 from 0 to 1, and labels."""
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
