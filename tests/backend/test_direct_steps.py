"""Steps on one device, without the optional in which Keras returns their logs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402
from support import small  # noqa: E402
from tensorflow.python.data.ops import optional_ops  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.backend.tensorflow.replicas import direct_steps  # noqa: E402
from keras_distplug.backend.tensorflow.runtime import versions  # noqa: E402

Found = tuple[list[bytes], dict[str, Any], list[float]]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Records every optional that Python opens."""
    found: list[bool] = []
    stock = optional_ops._OptionalImpl.has_value

    def has_value(self: Any, name: str | None = None) -> Any:
        found.append(tf.executing_eagerly())
        return stock(self, name)

    monkeypatch.setattr(optional_ops._OptionalImpl, "has_value", has_value)
    return found


def train(
    adapt: Callable[[keras.Model], Any], data: Callable[[], tf.data.Dataset], **compile: Any
) -> Found:
    model = small.model()
    model.compile(model.optimizer, "mse", metrics=["mae"], **compile)
    adapt(model)
    ran = model.fit(data(), validation_data=data(), epochs=2, verbose=0)
    logs = model.evaluate(data(), verbose=0)
    return [each.tobytes() for each in model.get_weights()], ran.history, logs


def test_keras(opened: list[bool]) -> None:
    """Keras opens an optional after every step. When this fails, remove `direct_steps`."""
    version = versions.find("keras")
    assert version is not None
    if versions._release(version.version) >= (3, 16):
        pytest.skip("Keras 3.16 has another loop.")
    train(lambda model: None, small.dataset)
    assert opened.count(True) == 5 * small.BATCHES


def unknown_length() -> tf.data.Dataset:
    return small.dataset().filter(lambda x, y: True)


@pytest.mark.parametrize("data", [small.dataset, unknown_length])
def test_same_bits(data: Callable[[], tf.data.Dataset], opened: list[bool]) -> None:
    """Without optionals, training and evaluation compute the same."""
    adapted = train(kd.adapt, data)
    assert opened.count(True) == 0
    with pytest.MonkeyPatch.context() as patch:  # everything else that `adapt` does remains
        patch.setattr(direct_steps, "maker", lambda model: model._make_function)
        assert train(kd.adapt, data) == adapted


@pytest.mark.parametrize("given", [{"steps_per_execution": 3}, {"run_eagerly": True}])
def test_other_steps(given: dict[str, Any]) -> None:
    """Keras' own functions run several steps, and eager ones."""
    assert train(kd.adapt, small.dataset, **given) == train(lambda _: None, small.dataset, **given)


def test_later_steps_per_execution() -> None:
    """A model compiled again, with another number of steps per execution, uses it."""
    model = kd.adapt(small.model())
    sizes: list[int] = []

    class Sizes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            sizes.append(batch)

    for steps in (1, 2):
        model.compile("sgd", "mse", steps_per_execution=steps)
        model.fit(small.dataset(), callbacks=[Sizes()], verbose=0)
    assert sizes[: small.BATCHES] == list(range(small.BATCHES))
    assert len(sizes) == small.BATCHES + small.BATCHES // 2


def test_assigned_steps_per_execution() -> None:
    """A number that is assigned later does not change the traced function, as in Keras."""

    class Assign(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.steps_per_execution = 2

    updates = []
    for adapt in (kd.adapt, lambda model: model):
        model = adapt(small.model())
        model.compile("sgd", "mse")
        model.fit(small.dataset(), callbacks=[Assign()], verbose=0)
        updates.append(int(model.optimizer.iterations))
    assert updates[0] == updates[1]


class Pair(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.layer(x)

    def train_step(self, data: Any) -> Any:
        loss = tf.reduce_mean((self(data[0]) - data[1]) ** 2)
        return {"z": loss, "pair": [loss, 2 * loss], "both": (loss, {"a": loss})}


class Logs(keras.callbacks.Callback):
    """Keeps the types in the logs of every batch."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.kept: list[str] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.kept.append(repr(keras.tree.map_structure(type, logs)))


def test_logs() -> None:
    """Callbacks get logs of the same structure and order as from Keras."""
    found = []
    for adapt in (kd.adapt, lambda model: model):
        model, logs = adapt(Pair()), Logs()
        model.compile("sgd")
        model.fit(small.dataset(), callbacks=[logs], verbose=0)
        found.append(logs.kept)
    assert found[0] == found[1]
    assert len(found[0]) == small.BATCHES
