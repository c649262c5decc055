"""Models whose `train_step` does not call them resume mid-epoch, without being called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402
from support import small  # noqa: E402

import keras_distplug as kd  # noqa: E402


class Parts(keras.Model):
    """Trains its parts, like an autoencoder or a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = keras.layers.Dense(3), keras.layers.Dense(4)
        self.first.build((None, 4)), self.last.build((None, 3))
        self.dropout = keras.layers.Dropout(0.3)

    def call(self, inputs: Any, decoded: Any) -> Any:
        raise AssertionError("called")

    def apart(self, x: Any) -> Any:
        return self.last(self.dropout(self.first(x), training=True))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            found = self.apart(x)
            loss = self.loss_of(x, y, found)
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return self.logs_of(x, y, found, loss)

    def loss_of(self, x: Any, y: Any, found: Any) -> Any:
        return tf.reduce_mean(tf.square(found - x))

    def logs_of(self, x: Any, y: Any, found: Any, loss: Any) -> dict[str, Any]:
        return {"loss": loss}


class WithTracker(Parts):
    """Also has a loss that it never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = keras.metrics.Mean(name="mine")

    @property
    def metrics(self) -> list[keras.Metric]:
        return [self.tracker]

    def logs_of(self, x: Any, y: Any, found: Any, loss: Any) -> dict[str, Any]:
        self.tracker.update_state(loss)
        return {"mine": self.tracker.result()}


class WithCompiledMetrics(Parts):
    def loss_of(self, x: Any, y: Any, found: Any) -> Any:
        return self.compute_loss(x, x, found)

    def logs_of(self, x: Any, y: Any, found: Any, loss: Any) -> dict[str, Any]:
        self._loss_tracker.update_state(loss)
        return self.compute_metrics(x, x, found)


class WithOwnLoss(WithCompiledMetrics):
    """Updates every compiled metric itself, and never uses the compiled loss."""

    def loss_of(self, x: Any, y: Any, found: Any) -> Any:
        return tf.reduce_mean(tf.square(found - x))

    def logs_of(self, x: Any, y: Any, found: Any, loss: Any) -> dict[str, Any]:
        for metric in self.metrics:
            metric.update_state(*((loss,) if metric.name == "loss" else (x, found)))
        return {metric.name: metric.result() for metric in self.metrics}


class WithSeveralLosses(WithCompiledMetrics):
    def apart(self, x: Any) -> Any:
        return {"a": super().apart(x), "b": self.last(self.first(x))}

    def loss_of(self, x: Any, y: Any, found: Any) -> Any:
        return self.compute_loss(x, {"a": x, "b": x}, found)

    def logs_of(self, x: Any, y: Any, found: Any, loss: Any) -> dict[str, Any]:
        self._loss_tracker.update_state(loss)
        return self.compute_metrics(x, {"a": x, "b": x}, found)


class Unbuilt(Parts):
    """Is built by its first step, which calls its layers outside the model's name scope."""

    def __init__(self) -> None:
        super().__init__()
        self.first = keras.Sequential([keras.layers.Dense(3)])
        self.last = keras.layers.Dense(4)


MODELS: dict[str, Callable[[], keras.Model]] = {
    "unbuilt": Unbuilt,
    "loss": Parts,
    "tracker": WithTracker,
    "compiled metrics": WithCompiledMetrics,
    "own loss": WithOwnLoss,
    "several losses": WithSeveralLosses,
}
COMPILED: dict[str, dict[str, Any]] = {
    "unbuilt": {},
    "loss": {},
    "tracker": {"loss": "mse"},
    "compiled metrics": {"loss": "mse", "metrics": ["mae", "mse"]},
    "own loss": {"loss": "mse", "metrics": ["mae", "mse"]},
    "several losses": {"loss": {"a": "mse", "b": "mae"}, "metrics": {"a": ["mae"], "b": ["mse"]}},
}


def fit(
    name: str, *callbacks: keras.callbacks.Callback, eager: bool = False, replicas: int = 1
) -> Any:
    strategy = tf.distribute.get_strategy()
    if replicas > 1:
        strategy = tf.distribute.MirroredStrategy([f"CPU:{n}" for n in range(replicas)])
    with strategy.scope():
        keras.utils.set_random_seed(5)
        model = MODELS[name]()
        model.compile("adam", run_eagerly=eager, **COMPILED[name])
        history = model.fit(small.dataset(), epochs=3, verbose=0, callbacks=list(callbacks))
    metrics = [v.numpy().tobytes() for v in model.metrics_variables]
    return small.state(model), metrics, history.history


class Validated(WithTracker):
    """Keras' own `test_step` creates metrics that its `train_step` lacks."""

    def call(self, inputs: Any) -> Any:
        return self.apart(inputs)

    def test_step(self, data: Any) -> dict[str, Any]:
        return super().test_step((data[0], data[0]))


def backup(directory: Path) -> kd.BackupAndRestore:
    return kd.BackupAndRestore(directory, save_freq=1, on_busy="wait", delete_checkpoint=False)


@pytest.mark.parametrize("name", MODELS)
def test_interrupted(name: str, tmp_path: Path) -> None:
    """Training ends with the weights, epoch metrics and History of plain Keras, from any batch
    on."""
    plain = fit(name)
    for place in [(1, 1), (2, 0)]:
        directory = tmp_path / f"{place}"
        with pytest.raises(small.Interrupted):
            fit(name, small.Stop(*place), backup(directory))
        weights, metrics, history = fit(name, backup(directory))
        assert weights == plain[0], place
        if name == "several losses":  # TensorFlow adds them up in any order
            assert history.pop("loss") == pytest.approx(plain[2]["loss"], rel=1e-6)
            assert history == {name: each for name, each in plain[2].items() if name != "loss"}
        else:
            assert (metrics, history) == plain[1:], place


@pytest.mark.parametrize("name", ["loss", "tracker", "own loss"])
def test_interrupted_eagerly(name: str, tmp_path: Path) -> None:
    """Steps that are not traced do so, too."""
    plain = fit(name, eager=True)
    with pytest.raises(small.Interrupted):
        fit(name, small.Stop(1, 1), backup(tmp_path), eager=True)
    assert fit(name, backup(tmp_path), eager=True) == plain


def test_metrics_that_an_eager_step_makes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Metrics created by an eager step get the values of the checkpoint before the first batch."""
    plain = fit("compiled metrics", eager=True)
    with pytest.raises(small.Interrupted):
        fit("compiled metrics", small.Stop(1, 1), backup(tmp_path), eager=True)
    assert fit("compiled metrics", backup(tmp_path), eager=True) == plain
    assert "metrics of this epoch do not cover the batches before" not in caplog.text


def test_validation(tmp_path: Path) -> None:
    """Metrics created by a test step get nothing of the epoch, and the epoch nothing of the
    test."""

    def train(*callbacks: keras.callbacks.Callback) -> Any:
        keras.utils.set_random_seed(5)
        model = Validated()
        model.compile("adam", loss="mse", metrics=["mae"])
        given = {"validation_data": small.dataset().take(2), "epochs": 3, "verbose": 0}
        history = model.fit(small.dataset(), **given, callbacks=list(callbacks))
        return small.state(model), history.history

    plain = train()
    assert "mine" in plain[1]
    for place in [(1, 1), (1, 3), (2, 0)]:
        directory = tmp_path / f"{place}"
        with pytest.raises(small.Interrupted):
            train(small.Stop(*place), backup(directory))
        assert train(backup(directory)) == plain, place


def test_failed_first_step(tmp_path: Path) -> None:
    """A `fit` that failed while its first step was traced leaves nothing on the model."""
    keras.utils.set_random_seed(5)
    model = WithCompiledMetrics()
    model.compile("adam", **COMPILED["compiled metrics"])
    with pytest.raises(small.Interrupted):
        fit("compiled metrics", small.Stop(1, 1), backup(tmp_path))
    given = {"epochs": 3, "verbose": 0}
    model.logs_of = lambda *_: tf.ones(3) + tf.ones(4)
    with pytest.raises(Exception, match="shape"):
        model.fit(small.dataset(), **given, callbacks=[backup(tmp_path)])
    del model.logs_of
    model.train_function = None
    history = model.fit(small.dataset(), **given, callbacks=[backup(tmp_path)])
    assert (small.state(model), history.history) == fit("compiled metrics")[::2]


def test_empty_validation(tmp_path: Path) -> None:
    """Validation data without batches has no logs, with or without a resume."""
    empty = small.dataset().take(0)

    def train(*callbacks: keras.callbacks.Callback) -> dict[str, Any]:
        given = {"validation_data": empty, "epochs": 2, "verbose": 0}
        found: dict[str, Any] = (
            small.model().fit(small.dataset(), **given, callbacks=list(callbacks)).history
        )
        return found

    plain = train()
    assert "val_loss" not in plain
    for place in [(1, 1), (1, 3)]:
        directory = tmp_path / f"{place}"
        with pytest.raises(small.Interrupted):
            train(small.Stop(*place), backup(directory))
        assert train(backup(directory)) == plain
