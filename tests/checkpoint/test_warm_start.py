"""A new run that starts with the weights of another one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
import numpy as np  # noqa: E402
from support import small  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.core.errors import NoCheckpointError, OtherRunError  # noqa: E402


def model(outputs: int = 1, *, more: bool = False) -> keras.Model:
    layers = [keras.layers.Dense(8, name="body"), keras.layers.Dense(outputs, name="head")]
    if more:
        layers.insert(1, keras.layers.Dense(8, name="new"))
    made = keras.Sequential([keras.Input((4,)), *layers])
    made.compile("adam", "mse")
    return made


def fit(made: keras.Model, folder: Path, *more: Any, **given: Any) -> None:
    y = np.repeat(small.Y, made.output_shape[-1], 1)
    callbacks = [*kd.defaults(folder, save_freq=1, on_busy="wait", **given), *more]
    made.fit(small.X, y, batch_size=8, verbose=0, callbacks=callbacks)


class AtStart(small.Watching):
    """Records the state with which training started."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            self.weights = {w.path: w.numpy() for w in self.model.weights}
            self.iterations = int(self.model.optimizer.iterations)
            self.rate = float(self.model.optimizer.learning_rate)


@pytest.fixture
def other(tmp_path: Path) -> tuple[Path, keras.Model]:
    made = model()
    fit(made, tmp_path / "other")
    return tmp_path / "other", made


def test_new_head(
    other: tuple[Path, keras.Model], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Variables that are new or have another shape are reported and keep their values."""
    folder, trained = other
    files = sorted(folder.rglob("*"))
    made, start = model(3, more=True), AtStart()
    before = {w.path: w.numpy() for w in made.weights}
    fit(made, tmp_path / "new", start, init_from=folder)
    body = [w.numpy() for w in trained.weights if "body" in w.path]
    expected = body + [value for path, value in before.items() if "body" not in path]
    for value, taken in zip(start.weights.values(), expected, strict=True):
        np.testing.assert_array_equal(value, taken)
    assert start.iterations == 0
    assert "2 of 6 variables are initialized from" in caplog.text
    assert re.search(
        r"and keeping their values: `.*`sequential\w*/head/kernel \[8, 3\]`", caplog.text
    )
    assert sorted(folder.rglob("*")) == files  # nothing is written there


def test_optimizer(other: tuple[Path, keras.Model], tmp_path: Path) -> None:
    """The optimizer is loaded with its state, but the script's learning rate."""
    folder, trained = other
    made, start = model(), AtStart()
    made.optimizer.learning_rate = 0.25
    fit(made, tmp_path / "new", start, init_from=folder, init_optimizer=True)
    assert start.iterations == int(trained.optimizer.iterations) > 0
    assert start.rate == 0.25


def test_restart(other: tuple[Path, keras.Model], tmp_path: Path) -> None:
    """A run with a checkpoint resumes from that; one killed before it starts in the same way
    again."""
    folder, _ = other
    expected = model()
    keras.utils.set_random_seed(1)
    fit(expected, tmp_path / "whole", init_from=folder)
    for at in (0, 2):
        keras.utils.set_random_seed(1)
        with pytest.raises(small.Interrupted):
            fit(model(), tmp_path / f"{at}", small.Stop(0, at), init_from=folder)
        keras.utils.set_random_seed(1)
        made = model()
        fit(made, tmp_path / f"{at}", init_from=folder)
        assert small.state(made) == small.state(expected)


def test_refused(other: tuple[Path, keras.Model], tmp_path: Path) -> None:
    """A missing run, or one without any match, is an error before training."""
    count = small.Stop()
    with pytest.raises(NoCheckpointError):
        fit(model(), tmp_path / "a", count, init_from=tmp_path / "nothing")
    wide = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, name="body")])
    wide.compile("adam", "mse")
    with pytest.raises(OtherRunError, match=r"Expected init_from to be a run of a similar model"):
        fit(wide, tmp_path / "b", count, init_from=other[0])
    assert count.batches == 0


def test_distributed_fit(other: tuple[Path, keras.Model], tmp_path: Path) -> None:
    folder, trained = other
    start = AtStart()
    kd.distributed_fit(
        model(), small.X, small.Y, batch_size=8, verbose=0, callbacks=[start],
        directory=tmp_path / "new", init_from=folder,
    )  # fmt: skip
    np.testing.assert_array_equal(next(iter(start.weights.values())), trained.weights[0].numpy())


def plain(layers: int = 3) -> keras.Model:
    """Layers with names that Keras numbers within a process."""
    hidden = [keras.layers.Dense(4) for _ in range(layers)]
    made = keras.Sequential([keras.Input((4,)), keras.layers.Normalization(), *hidden])
    made.compile("adam", "mse")
    return made


def test_names_that_are_counted(tmp_path: Path) -> None:
    """Layers of one shape are matched in order, whatever their numbers; the statistics of a
    `Normalization` are used immediately."""
    trained = plain()
    trained.layers[0].adapt(small.X * 3 + 1)
    fit(trained, tmp_path / "other")
    made, start = plain(), AtStart()
    fit(made, tmp_path / "new", start, init_from=tmp_path / "other")
    for value, weight in zip(start.weights.values(), trained.weights, strict=True):
        np.testing.assert_array_equal(value, weight)
    np.testing.assert_array_equal(made.layers[0].mean, trained.layers[0].mean)
