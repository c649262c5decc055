"""Arguments of `init`, without a cluster of several processes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(60)]

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug import startup  # noqa: E402
from keras_distplug.core.errors import ConfigurationError  # noqa: E402
from keras_distplug.core.timeouts import COLLECTIVE, HEARTBEAT, Timeouts  # noqa: E402


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> object:
    """Simulates a cluster of two workers that was formed with a timeout of 3 s."""
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    monkeypatch.setattr(startup, "_joined", {"multi_worker": (strategy := object())})
    monkeypatch.setattr(startup, "_joined_with", {"multi_worker": Timeouts(3.0)})
    return strategy


def test_too_late(joined: object) -> None:
    """Timeouts passed after the cluster has formed cause a warning with a remedy."""
    with pytest.warns(
        UserWarning, match=r"already joined.*heartbeat_secs=4\.0.*--heartbeat-timeout"
    ):
        assert startup.init(heartbeat_timeout_secs=4.0) is joined


def test_timeouts_in_force(joined: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no warning if the timeouts equal those in force, or none are passed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert startup.init(heartbeat_timeout_secs=3.0) is joined
        assert startup.init() is joined
        monkeypatch.setenv(HEARTBEAT, "3")
        assert startup.init() is joined


def test_invalid_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """An invalid timeout is refused, as an argument and in the environment, also on one device."""
    with pytest.raises(ConfigurationError, match="heartbeat timeout"):
        startup.init(heartbeat_timeout_secs=0.1)
    monkeypatch.setenv(COLLECTIVE, "soon")
    with pytest.raises(ConfigurationError, match=COLLECTIVE):
        startup.init()


@pytest.mark.timeout(180)
def test_strategy_name_of_init(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After `init` with a strategy's name, "auto" means that strategy; the `strategy` of a `fit`
    has no such effect."""
    monkeypatch.setattr(startup, "_asked_for", [])
    monkeypatch.setattr(startup, "_joined", {})
    monkeypatch.setattr(startup, "_joined_with", {})

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    def fitted(name: str, strategy: str) -> tf.distribute.Strategy:
        data, folder = np.ones((8, 2), "float32"), tmp_path / name
        history = kd.distributed_fit(
            build, data, data[:, :1], strategy=strategy, directory=folder, verbose=0
        )
        return history.model.distribute_strategy

    assert isinstance(fitted("asked", "mirrored"), tf.distribute.MirroredStrategy)
    assert kd.global_batch(4) == 4
    mirrored = kd.init("mirrored")
    assert mirrored.num_replicas_in_sync > 1
    assert kd.init() is mirrored
    assert kd.global_batch(4) == 4 * mirrored.num_replicas_in_sync
    assert fitted("named", "auto") is mirrored
    assert fitted("other", "one_device") is not mirrored
