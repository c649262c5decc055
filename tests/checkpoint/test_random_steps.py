"""TensorFlow's random ops in a step draw the same as in plain Keras, even after a resume."""

from __future__ import annotations

import warnings
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

Draw = Callable[[Any], Any]


class Noisy(keras.Model):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.draw, self.dense = draw, keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        return super().train_step((self.draw(x), y))

    def test_step(self, data: Any) -> Any:
        x, y = data
        return super().test_step((self.draw(x), y))


def in_a_branch(x: Any) -> Any:
    return tf.cond(tf.random.uniform([]) > 0.5, lambda: x * tf.random.uniform([4]), lambda: x)


def in_a_loop(x: Any) -> Any:
    times = tf.random.uniform([], 0, 4, tf.int32)

    def again(i: Any, x: Any) -> Any:
        return i + 1, x * tf.random.uniform([], 0.9, 1.1)

    return tf.while_loop(lambda i, x: i < times, again, (0, x))[1]


DRAWS: dict[str, Draw] = {
    "normal": lambda x: x + tf.random.normal(tf.shape(x)),
    "truncated_normal": lambda x: x + tf.random.truncated_normal([4], seed=7),
    "uniform": lambda x: x * tf.cast(tf.random.uniform([4], dtype=tf.float64), tf.float32),
    "uniform, integers": lambda x: x * tf.cast(tf.random.uniform([4], 1, 9, tf.int64), tf.float32),
    "dropout": lambda x: tf.nn.dropout(x, 0.4) + tf.keras.random.normal([4]),
    "in a branch": in_a_branch,
    "several": lambda x: (
        x * tf.random.uniform([4]) + tf.random.normal([4]) * tf.random.uniform([4])
    ),
}


def fit(
    draw: Draw, *callbacks: keras.callbacks.Callback, replicas: int = 1, **compiled: Any
) -> Any:
    strategy = tf.distribute.get_strategy()
    if replicas > 1:
        strategy = tf.distribute.MirroredStrategy([f"CPU:{n}" for n in range(replicas)])
    with strategy.scope():
        keras.utils.set_random_seed(5)
        model = Noisy(draw)
        model.compile("adam", "mse", **compiled)
    validation = {"validation_data": (small.X[:16], small.Y[:16]), "validation_batch_size": 8}
    history = model.fit(
        small.dataset(), epochs=3, verbose=0, callbacks=list(callbacks), **validation
    )
    return small.state(model), history.history


def backup(directory: Path) -> kd.BackupAndRestore:
    return kd.BackupAndRestore(directory, save_freq=1, on_busy="wait", delete_checkpoint=False)


def resumed(draw: Draw, place: tuple[int, int], directory: Path, **how: Any) -> Any:
    with pytest.raises(small.Interrupted):
        fit(draw, small.Stop(*place), backup(directory), **how)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "A resumed run")
        return fit(draw, backup(directory), **how)


@pytest.mark.parametrize("name", DRAWS)
def test_interrupted(name: str, tmp_path: Path) -> None:
    """Training ends bit for bit like plain Keras, resumed within an epoch, before its last batch,
    and after it."""
    plain = fit(DRAWS[name])
    for place in [(1, 1), (1, 3)]:
        assert resumed(DRAWS[name], place, tmp_path / f"{place}") == plain, place


def test_in_a_loop(tmp_path: Path) -> None:
    """A loop gets its numbers in order, which is not always so in plain Keras."""
    whole = fit(in_a_loop, backup(tmp_path / "whole"))
    assert resumed(in_a_loop, (1, 1), tmp_path) == whole


def test_interrupted_eagerly(tmp_path: Path) -> None:
    """Steps that are not traced continue drawing, too."""
    plain = fit(DRAWS["several"], run_eagerly=True)
    assert resumed(DRAWS["several"], (1, 1), tmp_path, run_eagerly=True) == plain


def test_on_replicas(tmp_path: Path) -> None:
    """The same under a strategy, which traces a step several times."""
    whole = fit(DRAWS["several"], backup(tmp_path / "whole"), replicas=2)
    assert resumed(DRAWS["several"], (1, 3), tmp_path, replicas=2) == whole


class TraceAgain(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.model.make_train_function(force=True)


def test_retraced(tmp_path: Path) -> None:
    """A new trace draws from the start, as in plain Keras."""
    plain = fit(DRAWS["several"], TraceAgain())
    assert fit(DRAWS["several"], TraceAgain(), backup(tmp_path / "whole")) == plain
    with pytest.raises(small.Interrupted):
        fit(DRAWS["several"], TraceAgain(), small.Stop(2, 1), backup(tmp_path))
    assert fit(DRAWS["several"], TraceAgain(), backup(tmp_path)) == plain


class Forget(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            keras.utils.set_random_seed(9)
        if epoch == 2:
            keras.backend.clear_session()


def test_restarted_kernels(tmp_path: Path) -> None:
    """`set_random_seed` and `clear_session` restart random ops, as in plain Keras."""
    plain = fit(DRAWS["normal"], Forget())
    assert fit(DRAWS["normal"], Forget(), backup(tmp_path / "whole")) == plain
    with pytest.raises(small.Interrupted):
        fit(DRAWS["normal"], Forget(), small.Stop(1, 2), backup(tmp_path))
    assert fit(DRAWS["normal"], Forget(), backup(tmp_path)) == plain


def test_two_fits(tmp_path: Path) -> None:
    """After a `fit` with the callbacks, a later one without them continues the sequences of random
    ops."""

    def train(*callbacks: keras.callbacks.Callback) -> Any:
        keras.utils.set_random_seed(5)
        model = Noisy(DRAWS["normal"])
        model.compile("adam", "mse")
        model.fit(small.dataset(), verbose=0, callbacks=list(callbacks))
        model.fit(small.dataset(), verbose=0)
        return small.state(model)

    assert train(backup(tmp_path), kd.NaNWatchdog()) == train()


def in_a_function(x: Any) -> Any:
    """TensorFlow may make two kernels of one op, because it is called twice."""
    draw = tf.function(lambda: tf.random.normal([4]))
    return x + draw() + draw()


@pytest.mark.parametrize(
    ("draw", "reason"),
    [
        (in_a_function, "RandomStandardNormal keeps its random state"),
        (lambda x: tf.random.shuffle(x), "RandomShuffle keeps its random state"),
        (lambda x: x * tf.random.gamma([4], 2.0), "RandomGamma keeps its random state"),
    ],
)
def test_unreadable_random_state(draw: Draw, reason: str, tmp_path: Path) -> None:
    """Other random ops draw as in plain Keras; a warning names the line and the remedy."""
    plain = fit(draw)
    with pytest.warns(UserWarning, match="may not compute the same steps") as caught:
        assert fit(draw, backup(tmp_path)) == plain
    line = draw.__code__.co_firstlineno + 2 * (draw is in_a_function)
    [warning] = [str(each.message) for each in caught if "A resumed run" in str(each.message)]
    assert f"(test_random_steps.py, line {line}): {reason}" in warning
    assert "SeedGenerator" in warning


def test_ops_that_map_over_a_batch(tmp_path: Path) -> None:
    """A vectorized function draws as in plain Keras."""

    def draw(x: Any) -> Any:
        return tf.vectorized_map(lambda row: row * tf.random.uniform([4]), x)

    plain = fit(draw)
    with pytest.warns(UserWarning, match="keeps its random state"):
        assert fit(draw, backup(tmp_path)) == plain


def test_without_a_seed(tmp_path: Path) -> None:
    """Without a seed, nothing can be repeated, and there is another remedy."""
    tf.random.set_seed(None)
    model = Noisy(DRAWS["normal"])
    model.compile("adam", "mse")
    with pytest.warns(UserWarning, match="has no seed. Call keras.utils.set_random_seed"):
        model.fit(small.dataset(), verbose=0, callbacks=[backup(tmp_path)])
