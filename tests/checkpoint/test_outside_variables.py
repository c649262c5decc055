"""Variables that a step uses are part of the run, even if they do not belong to the model."""

from __future__ import annotations

import random
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

Script = tuple[keras.Model, list[keras.callbacks.Callback]]


class Raise(keras.callbacks.Callback):
    """Raises a variable at a hook, as annealing and warm-up do."""

    def __init__(self, variable: Any, hook: str) -> None:
        super().__init__()
        setattr(self, hook, lambda *_, logs=None: variable.assign(variable * 1.7))


def weighted(variable: Any, hook: str) -> Script:
    """A loss whose weight a callback raises."""
    model = small.model()
    model.compile(
        "adam",
        lambda y, p: keras.ops.mean((y - p) ** 2, -1) * keras.ops.convert_to_tensor(variable),
    )
    return model, [Raise(variable, hook)]


def stateful_rnn() -> Script:
    shape = keras.Input(batch_shape=(6, 4))
    layers: list[Any] = [keras.layers.Reshape((2, 2)), keras.layers.GRU(3, stateful=True)]
    model = keras.Sequential([shape, *layers, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model, []


class Counting(keras.Model):
    """Has a variable that Keras does not track, and uses variables of its class and of the
    module."""

    factor: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.steps = tf.Variable(1.0, trainable=False)
        type(self).factor = tf.Variable(1.0)
        globals()["_of_module"] = tf.Variable([1.0])

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        for variable in (self.steps, self.factor, _of_module):
            variable.assign(variable * 1.01)
            x *= tf.reduce_sum(variable)
        return super().train_step((x, y))


_of_module: Any = None


def untracked() -> Script:
    model = Counting()
    model.compile("adam", "mse")
    return model, []


class Augmenting(keras.Model):
    def __init__(self, draw: Callable[[Any], Any], optimizer: Any = None) -> None:
        super().__init__()
        self.dense, self.draw = keras.layers.Dense(1), draw

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        return super().train_step((self.draw(x), y))


def augmenting(draw: Callable[[Any], Any]) -> Script:
    model = Augmenting(draw)
    model.compile("adam", "mse")
    return model, []


def layer_outside() -> Script:
    augment = keras.Sequential([keras.layers.GaussianNoise(0.3, seed=1)])
    return augmenting(lambda x: augment(x, training=True))


def generator() -> Script:
    generator = tf.random.Generator.from_seed(1)
    return augmenting(lambda x: x + generator.normal(tf.shape(x)))


def two_optimizers() -> Script:
    """Returns a model whose second optimizer is owned by no object, and is built in the first
    step."""
    shift = keras.Variable(np.ones(4, "float32"))
    adam = keras.optimizers.Adam(0.1)

    def draw(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x * shift.value) ** 2)
        adam.apply([tape.gradient(loss, shift.value)], [shift])
        return x * shift.value

    return augmenting(draw)


class Weighing(keras.Model):
    """Trains the weights of its two losses, which are not its own, with its own optimizer."""

    def __init__(self, sigmas: Any) -> None:
        super().__init__()
        self.dense, self.given = keras.layers.Dense(2), (lambda: sigmas)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        sigmas = self.given()
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean((self(x, training=True) - y) ** 2, 0)
            loss = tf.reduce_sum(losses * tf.exp(-sigmas.value) + sigmas.value)
        trained = [sigmas, *self.trainable_variables]
        self.optimizer.apply(tape.gradient(loss, [each.value for each in trained]), trained)
        return {"loss": loss}


def trained_outside() -> Script:
    model = Weighing(keras.Variable([0.1, 0.2]))
    model.compile("adam", "mse")
    return model, []


class Validated(keras.Model):
    """Only its validation changes a variable, which affects EarlyStopping and the logs."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.seen = keras.layers.Dense(1), tf.Variable(1.0)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def test_step(self, data: Any) -> Any:
        self.seen.assign_add(0.5)
        return {"loss": super().test_step(data)["loss"] * self.seen}


def validated() -> Script:
    model = Validated()
    model.compile("adam", "mse")
    return model, []


SCRIPTS: dict[str, Callable[[], Script]] = {
    "trained by the model's optimizer": trained_outside,
    "a stateful RNN": stateful_rnn,
    "Keras' variable, raised after epochs": lambda: weighted(keras.Variable(0.5), "on_epoch_end"),
    "TensorFlow's, raised before epochs": lambda: weighted(tf.Variable(0.5), "on_epoch_begin"),
    "one raised after batches": lambda: weighted(tf.Variable(0.1), "on_train_batch_end"),
    "untracked": untracked,
    "seeds of a layer outside": layer_outside,
    "a tf.random.Generator": generator,
    "an optimizer outside": two_optimizers,
    "one of the validation": validated,
}


def fit(name: str, *callbacks: keras.callbacks.Callback, eager: bool = False) -> Any:
    keras.utils.set_random_seed(5)
    model, others = SCRIPTS[name]()
    model.run_eagerly = eager
    rows = {"x": small.X, "y": small.Y, "batch_size": 6}  # five batches of one size
    validation = (small.X[:12], small.Y[:12])
    history = model.fit(
        **rows,
        validation_data=validation,
        validation_batch_size=6,
        epochs=3,
        verbose=0,
        callbacks=[*others, *callbacks],
    )
    return small.state(model), history.history


def backup(directory: Path) -> kd.BackupAndRestore:
    return kd.BackupAndRestore(directory, save_freq=1, on_busy="wait", delete_checkpoint=False)


@pytest.mark.parametrize("name", SCRIPTS)
def test_interrupted(name: str, tmp_path: Path) -> None:
    """Training ends with the weights and the History of plain Keras, from within an epoch and after
    its last batch."""
    plain = fit(name)
    for place in [(1, 1), (1, 4)]:
        directory = tmp_path / f"{place}"
        with pytest.raises(small.Interrupted):
            fit(name, small.Stop(*place), backup(directory))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "A resumed run")
            assert fit(name, backup(directory)) == plain, place


@pytest.mark.parametrize(
    "name", ["untracked", "TensorFlow's, raised before epochs", "a tf.random.Generator"]
)
def test_interrupted_eagerly(name: str, tmp_path: Path) -> None:
    """Steps that are not traced do so, too."""
    plain = fit(name, eager=True)
    with pytest.raises(small.Interrupted):
        fit(name, small.Stop(1, 1), backup(tmp_path), eager=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "A resumed run")
        assert fit(name, backup(tmp_path), eager=True) == plain


def test_variable_made_by_an_eager_step(tmp_path: Path) -> None:
    """A variable created by an eager step is reported by the first run."""
    with pytest.warns(
        UserWarning, match=r"<closure> adam/.*: the first step creates this variable"
    ):
        fit("an optimizer outside", backup(tmp_path), eager=True)


class OnReplicas(keras.Model):
    """One variable has a separate value on every replica, the other has one for all."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        none = tf.VariableAggregation.NONE
        self.own = tf.Variable(1.0, trainable=False, aggregation=none)
        self.common = tf.Variable(1.0, trainable=False, aggregation=tf.VariableAggregation.MEAN)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        self.own.assign(0.9 * self.own + 0.1 * tf.reduce_mean(x))
        self.common.assign(0.9 * self.common + 0.1 * tf.reduce_mean(x))
        return super().train_step((x * self.own * self.common, y))


def test_on_replicas(tmp_path: Path) -> None:
    """Every replica gets its own value back."""

    def train(*callbacks: keras.callbacks.Callback) -> Any:
        with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            keras.utils.set_random_seed(5)
            model = OnReplicas()
            model.compile("adam", "mse")
        given = {"batch_size": 6, "epochs": 3, "verbose": 0}
        model.fit(small.X, small.Y, **given, callbacks=list(callbacks))
        return (
            small.state(model),
            [float(part) for part in model.own.values],
            float(model.common.numpy()),
        )

    whole = train(backup(tmp_path / "whole"))
    assert whole[1][0] != whole[1][1]
    with pytest.raises(small.Interrupted):
        train(small.Stop(1, 1), backup(tmp_path))
    assert train(backup(tmp_path)) == whole


def test_finished(tmp_path: Path) -> None:
    """A finished run restores its variables, for later code of the script."""

    def train() -> float:
        variable = tf.Variable(0.5)
        model, others = weighted(variable, "on_epoch_end")
        given = {"batch_size": 6, "epochs": 3, "verbose": 0}
        model.fit(small.X, small.Y, **given, callbacks=[*others, backup(tmp_path)])
        return float(variable)

    trained = train()
    assert trained == pytest.approx(0.5 * 1.7**3)

    assert train() == trained


class Moody:
    """An object that raises when it is inspected."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} here")

    def __iter__(self) -> Any:
        raise RuntimeError("no entries here")

    @property
    def __class__(self) -> Any:
        raise RuntimeError("no class here")


def test_objects_that_raise(tmp_path: Path) -> None:
    """The search for a variable skips objects that raise errors."""
    variable = tf.Variable(0.5)
    model, [callback] = weighted(variable, "on_epoch_end")
    model.loss.moody = callback.moody = Moody()
    callbacks = [callback, backup(tmp_path)]
    model.fit(small.X, small.Y, verbose=0, epochs=2, callbacks=callbacks)
    assert float(variable) == pytest.approx(0.5 * 1.7**2)


def test_changed_shape(tmp_path: Path) -> None:
    """A variable whose shape the script has changed keeps its value, which is reported."""

    def train(size: int) -> None:
        variable = tf.Variable(tf.ones(size))
        model, _ = weighted(variable, "on_epoch_end")
        model.compile("adam", lambda y, p: keras.ops.mean((y - p) ** 2, -1) * variable[0])
        model.fit(small.X, small.Y, verbose=0, epochs=size, callbacks=[backup(tmp_path)])

    train(2)
    with pytest.warns(UserWarning, match=r"has the shape \(2,\) in the checkpoint and \(3,\) here"):
        train(3)


@pytest.mark.parametrize("eager", [False, True])
def test_unreachable_variable(eager: bool, tmp_path: Path) -> None:
    """A variable that cannot be reached by name is reported with its line, once, in the first
    step."""
    hidden = {frozenset({1, 2}): tf.Variable(2.0)}  # a key that another process may not know
    calls = []

    def draw(x: Any) -> Any:
        return x * hidden[frozenset({1, 2})].assign_add(0.5)

    model, _ = augmenting(draw)
    model.run_eagerly = eager
    first = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, logs: calls.append(len(caught))
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(small.X, small.Y, verbose=0, callbacks=[first, backup(tmp_path)])
    line = draw.__code__.co_firstlineno + 1
    [warning] = caught
    assert f"draw (test_outside_variables.py, line {line}): a variable" in str(warning.message)
    assert calls[0] == 1


class Draws(keras.layers.Layer):
    """Draws an initial value, which is not a constant of a trace."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(initializer=lambda *_, **__: np.random.normal())

    def call(self, x: Any) -> Any:
        return x * self.scale


@pytest.mark.parametrize("replicas", [1, 2])
def test_constants_drawn_in_python(replicas: int, tmp_path: Path) -> None:
    """A step that draws from Python or NumPy, which results in a constant, is reported with its
    line."""

    def mix(x: Any) -> Any:
        return x * np.random.beta(0.4, 0.4) + random.uniform(0, 1)

    stock = np.random.beta, random.uniform
    with tf.distribute.MirroredStrategy([f"CPU:{each}" for each in range(replicas)]).scope():
        model, _ = augmenting(mix)
        model.dense = keras.Sequential([Draws(), keras.layers.Dense(1)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(small.X, small.Y, verbose=0, callbacks=[backup(tmp_path)])
    line = mix.__code__.co_firstlineno + 1
    [warning] = [each for each in caught if "A resumed run" in str(each.message)]
    [_, found] = str(warning.message).split("\n")
    assert f"mix (test_outside_variables.py, line {line}): random.uniform runs when" in found
    assert (np.random.beta, random.uniform) == stock
