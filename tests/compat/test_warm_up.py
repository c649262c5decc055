"""What a spare does before it is needed makes no difference to what it computes."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.tf, pytest.mark.timeout(300)]

SCRIPT = """
import random, sys
import keras, numpy as np, tensorflow as tf
from keras_distplug.compat import context
if sys.argv[1] == "late":
    before = tf.constant(3)
if sys.argv[1] != "cold":
    context.warm_up()
assert context.is_initialized() == (sys.argv[1] == "late")
if sys.argv[1] == "late":
    assert int(before) == 3
random.seed(1), np.random.seed(2), tf.random.set_seed(3)
drawn = [random.random(), np.random.random(), tf.random.uniform(()).numpy().tobytes()]
keras.utils.set_random_seed(4)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dropout(0.5)])
model.compile("adam", "mse")
x = np.random.random((12, 3))
model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0)
print(model.name, drawn, [each.tobytes() for each in model.get_weights()])
"""


def test_same_numbers() -> None:
    """Seeds, names and bits are those of a process that has not warmed up; and one that has tensors
    keeps them."""
    cold, warm, late = (
        subprocess.run(
            [sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, timeout=200
        )
        for how in ("cold", "warm", "late")
    )
    assert cold.returncode == warm.returncode == late.returncode == 0, warm.stderr + late.stderr
    assert cold.stdout == warm.stdout
