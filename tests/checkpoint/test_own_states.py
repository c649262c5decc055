"""State that differs between replicas, and what happens to it if their number changes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

from keras_distplug.backend.tensorflow.replicas import replica_values  # noqa: E402
from keras_distplug.checkpoint import own_states  # noqa: E402
from keras_distplug.cluster.agreement import alone  # noqa: E402

AGGREGATIONS = ("sum", "mean", "only_first_replica")


class Own(keras.layers.Layer):
    """A per-replica variable for every aggregation."""

    def __init__(self) -> None:
        super().__init__()
        self.own = [
            keras.Variable(
                [0.0, 0.0], name=each, trainable=False, synchronization="on_read", aggregation=each
            )
            for each in AGGREGATIONS
        ]

    def call(self, x: Any) -> Any:
        return x


def model(replicas: int) -> keras.Model:
    strategy: Any = tf.distribute.get_strategy()
    if replicas > 1:
        strategy = tf.distribute.MirroredStrategy([f"CPU:{n}" for n in range(replicas)])
    with strategy.scope():
        made = keras.Sequential([keras.Input((2,)), Own()])
        made.compile("sgd", "mse")
        return made


def values(of: keras.Model) -> dict[str, list[list[float]]]:
    return {
        variable.name: [part.numpy().tolist() for part in replica_values.parts(variable)]
        for variable in of.weights
    }


def moved(found: keras.Model, replicas: int) -> keras.Model:
    """Returns a model with this number of replicas that has restored the state of `found`."""
    stored = own_states.capture(found, alone(), 1, in_epoch=False)
    arrays = {key: array.numpy() for key, array in stored.arrays.items()}
    made = model(replicas)
    assert own_states.restore_existing(made, arrays, 0, 1, in_epoch=False) is None
    return made


def test_other_number_of_replicas() -> None:
    """Two replicas' values are combined by every variable's own aggregation, and the same number of
    replicas gets them back unchanged."""
    two = model(2)
    for variable in two.weights:
        replica_values.set_parts(variable, [[1.0, 2.0], [3.0, 6.0]])
    assert values(moved(two, 2)) == values(two)
    assert values(moved(two, 1)) == {
        "sum": [[4.0, 8.0]],
        "mean": [[2.0, 4.0]],
        "only_first_replica": [[1.0, 2.0]],
    }
    assert values(moved(moved(two, 1), 2)) == {
        "sum": [[4.0, 8.0], [0.0, 0.0]],
        "mean": [[2.0, 4.0]] * 2,
        "only_first_replica": [[1.0, 2.0]] * 2,
    }
