"""A step called with batches is traced for the same sizes as in the process that it resumes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402
from support import small  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.backend.tensorflow.replicas import retraces  # noqa: E402
from keras_distplug.backend.tensorflow.replicas.retraces import Retraces  # noqa: E402

if not hasattr(keras.Model, "_autoconvert_optionals"):
    pytest.skip("this Keras calls no step with a batch", allow_module_level=True)


class Noting(keras.Model):
    """Notes the shapes that its step is traced for."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.traced: list[int | None] = []

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        self.traced.append(data[0].shape[0])
        return super().train_step(data)


def adapted() -> Noting:
    keras.utils.set_random_seed(5)
    model = Noting()
    model.compile("sgd", "mse")
    model(small.X[:1])
    model.optimizer.build(model.trainable_variables)
    return kd.adapt(model)  # type: ignore[return-value]


def train(model: Noting, *sizes: int) -> list[bytes]:
    for size in sizes:
        model.train_on_batch(small.X[:size], small.Y[:size])
    return small.state(model)


def test_same_traces() -> None:
    """A resumed process makes the same traces, even if its first batch is the smaller one."""
    model, resumed = adapted(), adapted()
    made = Retraces.of(model).made
    expected = train(model, 8)
    stored = list(made["train_step"])
    assert [each.shapes[0] for each in stored] == [(8, *small.X.shape[1:])]
    sizes = [5, 8, 3]
    train(resumed, 8)
    resumed.make_train_function(force=True)
    resumed.traced.clear()
    Retraces.of(resumed).stored["train_step"] = stored
    assert train(resumed, *sizes) == train(model, *sizes) != expected
    assert resumed.traced == model.traced
    assert model.traced == [8, None]
    assert Retraces.of(resumed).made == made


def test_control() -> None:
    """The tests can fail: without this feature, a process that starts with the smaller batch makes
    other traces."""
    model, other = adapted(), adapted()
    train(model, 8, 5)
    train(other, 5, 8)
    assert model.traced != other.traced


def test_traces_from_scratch() -> None:
    """If a callback makes the step be traced from scratch, no stored trace is repeated."""
    model = adapted()
    train(model, 8, 5)
    Retraces.of(model).stored["train_step"] = Retraces.of(model).made["train_step"]
    model.make_train_function(force=True)
    assert not Retraces.of(model).made
    assert not Retraces.of(model).stored
    train(model, 3)
    assert model.traced[-1] == 3


@pytest.mark.parametrize(
    "part",
    [
        lambda: tf.constant([[1.0, 2.0]]),
        lambda: tf.ragged.constant([[1.0], [2.0, 3.0]]),
        lambda: tf.sparse.from_dense([[0.0, 1.0]]),
    ],
    ids=["tensor", "ragged", "sparse"],
)
def test_specs(part: Callable[[], Any]) -> None:
    """A step is not traced again for a batch of a kind that it was already traced for."""
    function = tf.function(lambda data: data["x"], reduce_retracing=True)
    data = {"x": part(), "y": None}
    shapes = tuple(map(retraces._get_shape, tf.nest.flatten(data)))
    function.get_concrete_function(retraces._specs(data, shapes))
    function(data)
    assert function.experimental_get_tracing_count() == 1


def test_other_data() -> None:
    """Traces are not repeated if the batch has other parts than the stored ones."""
    assert retraces._specs((tf.constant(1.0),), ((), ())) is None
    assert retraces._specs((tf.constant(1.0),), (None,)) is None
    model = adapted()
    Retraces.of(model).stored["train_step"] = [retraces.Request(((8, 3),), {})]
    train(model, 8)
    assert model.traced == [8]
