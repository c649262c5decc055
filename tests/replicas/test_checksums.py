"""Checksums of values that are the same on all replicas."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from keras_distplug.backend.tensorflow import trainer  # noqa: E402
from keras_distplug.backend.tensorflow.replicas import replica_values  # noqa: E402
from keras_distplug.replicas.checksums import checksum, checksums  # noqa: E402


def trained(strategy: tf.distribute.Strategy, dtype: str = "float32") -> keras.Model:
    with strategy.scope():
        keras.utils.set_random_seed(1)
        layers = keras.layers
        normalized = layers.BatchNormalization(dtype=dtype)
        made = keras.Sequential(
            [keras.Input((4,)), normalized, layers.Dropout(0.5), layers.Dense(1, dtype=dtype)]
        )
        made.compile("adam", "mse", metrics=["mae"])
    x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
    trainer.adapt(made).fit(x, x[:, :1], batch_size=8, verbose=0)
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_healthy_replicas(dtype: str) -> None:
    """Healthy replicas have equal checksums although their metrics differ. They are numbered from
    `first_replica` on."""
    made = trained(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), dtype)
    found = checksums(made, 4)()
    assert list(found) == [4, 5]
    assert found[4] == found[5]
    names = "\n".join(found[4])
    for part in ("moving_mean", "gamma", "kernel", "momentum", "seed_generator"):
        assert part in names
    assert "mean_absolute_error" not in names


def test_values_at_the_call() -> None:
    """Checksums are those of the values at the time of the call."""
    made = trained(tf.distribute.get_strategy())
    before = checksums(made, 0)()
    later = checksums(made, 0)
    made.optimizer.iterations.assign(77)
    for variable in made.trainable_variables:
        variable.assign(variable + 1)
    assert later() == before
    assert checksums(made, 0)() != before


def test_differing_variable() -> None:
    """A variable that differs on a replica is found under its own name."""
    made = trained(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))
    kernel = made.trainable_variables[-2]
    one, other = (np.array(each) for each in replica_values.parts(kernel))
    replica_values.set_parts(kernel, [one, -other])
    found = checksums(made, 0)()
    different = [name for name in found[0] if found[0][name] != found[1][name]]
    assert different == [f"model/{kernel.path}"]


def test_checksum() -> None:
    """Any array has a checksum; the sign of zero counts."""
    assert checksum(np.float32(0)) != checksum(np.float32(-0.0))
    assert checksum(np.zeros((2, 0))) == checksum(np.zeros(0))
    x = np.arange(6).reshape(2, 3)
    assert checksum(x.T) == checksum(np.ascontiguousarray(x.T)) != checksum(x)
