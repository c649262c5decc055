from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import tensorflow as tf  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.core.errors import ConfigurationError  # noqa: E402


@pytest.fixture
def mirrored() -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def test_current_strategy(mirrored: tf.distribute.Strategy) -> None:
    """The strategy is the one passed, the one in scope, or that of `init()`: here, one device."""
    assert kd.global_batch(32, mirrored) == 64
    assert kd.scaled_learning_rate(0.1, mirrored) == 0.2
    with mirrored.scope():
        assert kd.global_batch(32) == 64
    assert kd.global_batch(32) == 32
    assert kd.scaled_learning_rate(0.1) == 0.1


@pytest.mark.parametrize("per_replica", [0, -1, 2.5, True, "32"])
def test_invalid_batch_size(per_replica: object) -> None:
    """An invalid batch size is refused, and the message shows it."""
    with pytest.raises(ConfigurationError, match=f"at least 1. Received: {per_replica!r}"):
        kd.global_batch(per_replica)  # type: ignore[arg-type]
