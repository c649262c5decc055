"""Callbacks that freeze, unfreeze or compile the model during training."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from support import small  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.core.errors import OtherRunError  # noqa: E402

Change = Callable[[keras.Model], None]


class At(keras.callbacks.Callback):
    """Changes the model once, at the start or the end of an epoch."""

    def __init__(self, hook: str, epoch: int, change: Change) -> None:
        super().__init__()
        self.hook, self.epoch, self.change = hook, epoch, change

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if (self.hook, epoch) == ("begin", self.epoch):
            self.change(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if (self.hook, epoch) == ("end", self.epoch):
            self.change(self.model)


def compiled(**arguments: Any) -> Change:
    def change(model: keras.Model) -> None:
        model.layers[0].trainable = True
        model.compile(**{"optimizer": model.optimizer, "loss": "mse", **arguments})
        model.make_train_function(force=True)

    return change


def unfreeze_only(model: keras.Model) -> None:
    """Has no effect in Keras until the next trace, which does not happen."""
    model.layers[0].trainable = True


def unfreeze_for_next_trace(model: keras.Model) -> None:
    model.layers[0].trainable = True
    model.make_train_function(force=True)


@keras.saving.register_keras_serializable("tests")
def registered(y: Any, predicted: Any) -> Any:
    return keras.ops.abs(y - predicted)


CHANGES: dict[str, Change] = {
    "a new optimizer": lambda model: compiled(optimizer="adam")(model),
    "the same optimizer": compiled(),
    "another class": lambda model: compiled(optimizer=keras.optimizers.SGD(0.01))(model),
    "another loss": compiled(loss="mae", metrics=["mse"]),
    "a registered loss": compiled(optimizer="adam", loss=registered),
    "without a trace": unfreeze_only,
    "with a trace": unfreeze_for_next_trace,
}


def fit(
    change: str,
    hook: str,
    *callbacks: keras.callbacks.Callback,
    replicas: int = 1,
    has_dropout: bool = True,
) -> Any:
    strategy = tf.distribute.get_strategy()
    if replicas > 1:
        strategy = tf.distribute.MirroredStrategy([f"CPU:{n}" for n in range(replicas)])
    with strategy.scope():
        model = small.model()
        model.layers[1].rate = 0.3 if has_dropout else 0.0
        model.layers[0].trainable = False
        model.compile(keras.optimizers.Adam(0.01), "mse")
        if change in ("the same optimizer", "another loss", "of the script", "with a trace"):
            model.layers[0].trainable = True
            model.optimizer.build(model.trainable_variables)
            model.layers[0].trainable = False
        others = [At(hook, 1, CHANGES[change])]
        history = model.fit(
            small.X, small.Y, batch_size=8, epochs=4, verbose=0, callbacks=[*others, *callbacks]
        )
    return small.state(model), history.history


def backup(directory: Path) -> kd.BackupAndRestore:
    return kd.BackupAndRestore(directory, save_freq=1, on_busy="wait", delete_checkpoint=False)


@pytest.mark.parametrize("hook", ["begin", "end"])
@pytest.mark.parametrize("change", CHANGES)
def test_interrupted(change: str, hook: str, tmp_path: Path) -> None:
    """Runs interrupted before, in and after the changed epoch give the bits of plain Keras."""
    plain = fit(change, hook)
    for place in [(1, 1), (1, 3), (2, 1)]:
        directory = tmp_path / f"{place}"
        with pytest.raises(small.Interrupted):
            fit(change, hook, small.Stop(*place), backup(directory))
        assert fit(change, hook, backup(directory)) == plain, place


def test_on_replicas(tmp_path: Path) -> None:
    """After a callback has compiled the model, replicas still compute the same as one process."""
    plain = {"has_dropout": False}
    one, _ = fit("a new optimizer", "begin", **plain)
    two, _ = fit("a new optimizer", "begin", backup(tmp_path / "whole"), replicas=2, **plain)
    weights = zip(one[:4], two[:4], strict=True)
    for there, here in ([np.frombuffer(each, "float32") for each in pair] for pair in weights):
        np.testing.assert_allclose(here, there, rtol=1e-3, atol=1e-5)
    with pytest.raises(small.Interrupted):
        fit("a new optimizer", "begin", small.Stop(2, 1), backup(tmp_path), replicas=2, **plain)
    assert fit("a new optimizer", "begin", backup(tmp_path), replicas=2, **plain)[0] == two


def test_unserializable_loss(tmp_path: Path) -> None:
    """A loss that cannot be re-created is refused before training, with the reason."""

    def of_script(y: Any, predicted: Any) -> Any:
        return keras.ops.abs(y - predicted)

    CHANGES["of the script"] = compiled(loss=of_script)
    try:
        with pytest.raises(small.Interrupted):
            fit("of the script", "begin", small.Stop(2, 1), backup(tmp_path))
        stop = small.Stop()
        with pytest.raises(OtherRunError, match="A callback recompiled the model"):
            fit("of the script", "begin", stop, backup(tmp_path))
        assert stop.batches == 0
    finally:
        del CHANGES["of the script"]


class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """Has no config."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, step: Any) -> Any:
        return self.rate / (1 + 0.1 * keras.ops.cast(step, "float32"))


def test_schedule_without_config(tmp_path: Path) -> None:
    """A callback that compiles with something without a config is refused, too."""
    CHANGES["schedule"] = compiled(optimizer=keras.optimizers.Adam(Schedule(0.5)))
    try:
        with pytest.raises(small.Interrupted):
            fit("schedule", "begin", small.Stop(2, 1), backup(tmp_path))
        with pytest.raises(OtherRunError, match="A callback recompiled the model"):
            fit("schedule", "begin", backup(tmp_path))
    finally:
        del CHANGES["schedule"]


def add_optimizer(model: keras.Model) -> None:
    model.second = keras.optimizers.SGD(0.1)
    model.second.build(model.trainable_variables)


def test_added_optimizer(tmp_path: Path) -> None:
    """If a callback adds an optimizer to the model, this is reported before training."""
    CHANGES["second"] = add_optimizer
    try:
        with pytest.raises(small.Interrupted):
            fit("second", "begin", small.Stop(2, 1), backup(tmp_path))
        with pytest.raises(OtherRunError, match=r"a callback changed this model .* `second/sgd"):
            fit("second", "begin", backup(tmp_path))
    finally:
        del CHANGES["second"]


def two_fits(
    directory: Path | None, first: bool, second: bool, caplog: pytest.LogCaptureFixture
) -> keras.Model:
    model = small.model()
    for is_trained, epochs in ((first, 2), (second, 4)):
        model.layers[0].trainable = is_trained
        model.compile("adam", "mse")
        callbacks = [] if directory is None else [backup(directory)]
        caplog.clear()
        model.fit(small.X, small.Y, batch_size=8, epochs=epochs, verbose=0, callbacks=callbacks)
    return model


@pytest.mark.parametrize("is_first", [False, True])
def test_two_fits(is_first: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With more epochs, the second `fit` trains the variables that are trainable then, keeps the
    optimizer slots of those it trained before, and logs this."""
    model = two_fits(tmp_path, is_first, not is_first, caplog)
    assert int(model.optimizer.iterations) == 4 * small.BATCHES
    trained = 4 if not is_first else 2
    assert len(model.optimizer._momentums) == trained
    last = model.optimizer._momentums[-1].numpy()
    assert np.abs(last).sum() > 0
    assert "the set of trained variables has changed since the checkpoint: " in caplog.text
    assert ("with empty optimizer slots" in caplog.text) == (not is_first)
    assert ("no longer trained" in caplog.text) == is_first


def test_no_warning_about_fine_tuning(tmp_path: Path) -> None:
    """Fine-tuning in two `fit` calls causes no warning."""
    model = small.model()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "A resumed run")
        for epochs in (1, 2):
            model.layers[0].trainable = epochs == 2
            model.compile("adam", "mse", metrics=["mae"])
            given = {"validation_data": (small.X, small.Y), "epochs": epochs, "verbose": 0}
            model.fit(small.X, small.Y, **given, callbacks=[backup(tmp_path), kd.NaNWatchdog()])


def test_steps_after_fit() -> None:
    """The watchdog guards only `fit`, and no steps after it."""
    model = small.model()
    model.fit(small.X, small.Y, verbose=0, callbacks=[kd.NaNWatchdog()])
    model.train_on_batch(small.X * np.nan, small.Y)
    assert not np.isfinite(model.get_weights()[0]).all()


def test_nan_watchdog(tmp_path: Path) -> None:
    """The watchdog still guards updates after a callback has replaced the optimizer."""
    x = small.X.copy()
    x[17] = np.nan  # in the third batch
    model = small.model()
    watchdog = kd.NaNWatchdog()
    model.fit(
        x,
        small.Y,
        batch_size=8,
        shuffle=False,
        epochs=3,
        verbose=0,
        callbacks=[At("begin", 1, compiled(optimizer="adam")), watchdog, backup(tmp_path)],
    )
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


class StopInSecondExecution(small.Watching):
    """Interrupts the second epoch. Keras 3.10 numbers an execution by its first batch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch, self.executions = epoch, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.executions += 1
        if (self.epoch, self.executions) == (1, 2):
            raise small.Interrupted


@pytest.mark.parametrize(("first", "later"), [(2, 1), (4, 2)])
def test_other_steps_per_execution(first: int, later: int, tmp_path: Path) -> None:
    """A callback may compile the model with another number of steps per execution."""

    def fit(*callbacks: keras.callbacks.Callback) -> Any:
        model = small.model()
        model.compile("sgd", "mse", steps_per_execution=first)
        change = At("begin", 1, compiled(steps_per_execution=later))
        x, y = np.tile(small.X, [2, 1])[:56], np.tile(small.Y, [2, 1])[:56]
        model.fit(x, y, batch_size=7, epochs=3, verbose=0, callbacks=[change, *callbacks])
        return small.state(model)

    plain = fit()
    with pytest.raises(small.Interrupted):
        fit(StopInSecondExecution(), backup(tmp_path))
    assert fit(backup(tmp_path)) == plain
