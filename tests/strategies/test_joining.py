"""Arguments of `init`, without a cluster."""

from __future__ import annotations

import json
import warnings

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(60)]

from keras_distplug import startup  # noqa: E402
from keras_distplug.core.errors import ConfigurationError  # noqa: E402
from keras_distplug.core.timeouts import COLLECTIVE, HEARTBEAT, Timeouts  # noqa: E402


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> object:
    """As if a cluster of two workers had been formed with a time-out of 3 s."""
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    monkeypatch.setattr(startup, "_joined", {"multi_worker": (strategy := object())})
    monkeypatch.setattr(startup, "_joined_with", {"multi_worker": Timeouts(3.0)})
    return strategy


def test_too_late(joined: object) -> None:
    """Time-outs that come behind the cluster are warned of, with what to do instead."""
    with pytest.warns(
        UserWarning, match=r"formed already.*heartbeat_secs=4\.0.*--heartbeat-timeout"
    ):
        assert startup.init(heartbeat_timeout_secs=4.0) is joined


def test_in_force(joined: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said where the time-outs are those in force, or none are given."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert startup.init(heartbeat_timeout_secs=3.0) is joined
        assert startup.init() is joined
        monkeypatch.setenv(HEARTBEAT, "3")
        assert startup.init() is joined


def test_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time-out that cannot be is refused, by argument and by environment, on one device, too."""
    with pytest.raises(ConfigurationError, match="heartbeat time-out"):
        startup.init(heartbeat_timeout_secs=0.1)
    monkeypatch.setenv(COLLECTIVE, "soon")
    with pytest.raises(ConfigurationError, match=COLLECTIVE):
        startup.init()
