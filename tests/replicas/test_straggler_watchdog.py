"""A replica that the others wait for, in one process. Real times on several workers are tested in
tests/scenarios/test_stragglers_of_workers.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.backend.tensorflow.runtime.attached import attached  # noqa: E402
from keras_distplug.core.errors import ConfigurationError  # noqa: E402
from keras_distplug.replicas.stragglers import Straggler  # noqa: E402
from keras_distplug.step.instrumentation import StepInstrumentation  # noqa: E402
from keras_distplug.step.stopwatch import Lap, Stopwatch  # noqa: E402

WINDOW = 3
WINDOWS = 8


def data() -> tf.data.Dataset:
    x = np.random.default_rng(0).normal(size=(8 * WINDOW * WINDOWS, 4)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1] * 2)).batch(8)


def model(replicas: int = 2, kind: type = keras.Model, **compiled: Any) -> keras.Model:
    strategy = tf.distribute.MirroredStrategy([f"CPU:{each}" for each in range(replicas)])
    with strategy.scope():
        inputs = keras.Input((4,))
        made = kind(inputs, keras.layers.Dense(1)(inputs))
        made.compile("sgd", "mse", **compiled)
    return kd.adapt(made)


@pytest.fixture
def slow_from(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The step from which replica 1 takes twice as long as the other, and the number of laps."""
    chosen = [0, 0]

    def note(self: Stopwatch, replica: Any, *_: Any) -> np.ndarray:
        is_slow = int(replica) == 1 and chosen[1] // 2 >= chosen[0]
        chosen[1] += 1
        for heard in self._listeners:
            heard.laps.append(Lap(int(replica), 0.0, 20.0 if is_slow else 10.0))
        return np.array(1.0)

    monkeypatch.setattr(Stopwatch, "_note", note)
    return chosen


@pytest.mark.parametrize("steps", [1, 3])
def test_reported(steps: int, slow_from: list[int], caplog: pytest.LogCaptureFixture) -> None:
    """After enough consecutive windows, a straggler is logged and passed to the function."""
    slow_from[0] = 3 * WINDOW
    heard: list[tuple[int, Straggler]] = []
    watchdog = kd.StragglerWatchdog(
        WINDOW, 3, on_straggler=lambda found: heard.append((slow_from[1] // 2, found))
    )
    model(steps_per_execution=steps).fit(data(), verbose=0, callbacks=[watchdog])
    [(step, found)] = heard
    assert step == 6 * WINDOW
    assert (found.cause, found.replica, found.score, found.past_s) == ("compute", 1, 0.5, 10.0)
    assert "straggler: replica 1 (worker-0 on " in caplog.text


def test_second_fit(slow_from: list[int]) -> None:
    """Every `fit` starts from scratch."""
    heard: list[Straggler] = []
    made, watchdog = model(), kd.StragglerWatchdog(WINDOW, on_straggler=heard.append)
    for _ in range(2):
        made.fit(data(), verbose=0, callbacks=[watchdog])
    assert [each.replica for each in heard] == [1, 1]


def test_single_replica() -> None:
    """A single replica cannot be compared, and its step stays unchanged."""
    inputs = keras.Input((4,))
    made = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    made.compile("sgd", "mse")
    made.fit(data(), verbose=0, callbacks=[kd.StragglerWatchdog(WINDOW)])
    assert attached(made, StepInstrumentation) is None


class Past(keras.Model):
    def train_step(self, data):
        return {"loss": tf.constant(0.0)}


def test_unmeasurable_model() -> None:
    with pytest.warns(UserWarning, match="StragglerWatchdog cannot measure the replicas"):
        model(kind=Past).fit(data(), verbose=0, callbacks=[kd.StragglerWatchdog(WINDOW)])


@pytest.mark.parametrize("is_first", [True, False])
def test_replaces_the_default(is_first: bool, slow_from: list[int], tmp_path: Path) -> None:
    """The user's own instance replaces the one among `defaults()`, regardless of the order."""
    heard: list[Straggler] = []
    own = kd.StragglerWatchdog(WINDOW, on_straggler=heard.append)
    theirs = kd.defaults(tmp_path)
    callbacks = [own, *theirs] if is_first else [*theirs, own]
    model().fit(data(), verbose=0, callbacks=callbacks)
    assert [each.replica for each in heard] == [1]


@pytest.mark.parametrize(
    "arguments",
    [
        {"every_steps": 0},
        {"every_steps": 2.5},
        {"windows": True},
        {"threshold": 1},
        {"threshold": 0},
    ],
)
def test_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(arguments))):
        kd.StragglerWatchdog(**arguments)
