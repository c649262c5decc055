"""A model created outside the scope is moved into it, and gets the trained state back."""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def mirrored() -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def deterministic() -> keras.Model:
    keras.utils.set_random_seed(5)
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(8, activation="relu")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 3, 0.5)
    model.compile(
        keras.optimizers.Adam(schedule), "mse", metrics=[keras.metrics.MeanAbsoluteError()]
    )
    return model


@keras.saving.register_keras_serializable("tests")
class Subclass(keras.Model):
    def __init__(self, units: int, **more: Any) -> None:
        super().__init__(**more)
        self.units = units
        self.hidden = keras.layers.Dense(units, activation="relu")
        self.last = keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.last(self.hidden(inputs))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


def subclass() -> keras.Model:
    keras.utils.set_random_seed(5)
    model = Subclass(8)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model(small.X[:1])
    return model


def close(found: keras.Model, expected: keras.Model) -> None:
    mine, theirs = ([*m.variables, *m.optimizer.variables] for m in (found, expected))
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=2e-5, atol=1e-7, err_msg=a.path)


@pytest.mark.parametrize("make", [deterministic, subclass])
def test_model_from_outside(make: Any, mirrored: tf.distribute.Strategy, tmp_path: Path) -> None:
    """The caller's model has the trained weights and optimizer state, and further training gives
    the same result as without the strategy."""
    given = {"x": small.X, "y": small.Y, "batch_size": 10, "shuffle": False, "verbose": 0}
    expected, mine = make(), make()
    for model in (expected, mine):
        model.fit(**given)
    expected.fit(**given, epochs=2)
    history = kd.distributed_fit(mine, **given, epochs=2, directory=tmp_path, strategy=mirrored)
    assert history.model is not mine
    assert history.model.distribute_strategy is mirrored
    assert mine.distribute_strategy is not mirrored
    assert mine.optimizer.iterations.numpy() == 9
    close(mine, expected)
    for model in (expected, mine):
        model.fit(**given)
    close(mine, expected)
    np.testing.assert_allclose(
        mine.predict(small.X, verbose=0), expected.predict(small.X, verbose=0), rtol=1e-4
    )


@pytest.mark.parametrize("rate", [None, 0.3])
def test_unbuilt_model(
    rate: float | None, mirrored: tf.distribute.Strategy, tmp_path: Path
) -> None:
    """An unbuilt model is built afterwards, even if it has a seed generator's state."""
    between = [] if rate is None else [keras.layers.Dropout(rate)]
    model = keras.Sequential([keras.layers.Dense(3), *between, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    history = kd.distributed_fit(
        model, small.X, small.Y, batch_size=10, directory=tmp_path, strategy=mirrored, verbose=0
    )
    assert small.state(model) == small.state(history.model)


def test_model_created_in_scope(mirrored: tf.distribute.Strategy, tmp_path: Path) -> None:
    """A model created inside a scope is trained as it is, under its own strategy."""
    with mirrored.scope():
        model = deterministic()
    history = kd.distributed_fit(
        model, small.X, small.Y, batch_size=10, directory=tmp_path, verbose=0
    )
    assert history.model is model


def test_strategy_name_of_a_model_in_scope(
    mirrored: tf.distribute.Strategy, tmp_path: Path
) -> None:
    """The name of the strategy that the model is already under is accepted."""
    with mirrored.scope():
        model = deterministic()
    given = {"x": small.X, "y": small.Y, "batch_size": 10, "verbose": 0}
    history = kd.distributed_fit(model, **given, directory=tmp_path, strategy="mirrored")
    assert history.model is model


def test_adapted_normalization(mirrored: tf.distribute.Strategy, tmp_path: Path) -> None:
    """State that a layer has learned from data with `adapt` is moved, too."""

    def normalized() -> keras.Model:
        keras.utils.set_random_seed(3)
        normalization = keras.layers.Normalization()
        normalization.adapt(10 * small.X + 3)
        model = keras.Sequential([keras.Input((4,)), normalization, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    given = {"x": small.X, "y": small.Y, "batch_size": 10, "shuffle": False, "verbose": 0}
    expected, mine = normalized(), normalized()
    expected.fit(**given)
    kd.distributed_fit(mine, **given, directory=tmp_path, strategy=mirrored)
    close(mine, expected)
    np.testing.assert_allclose(
        mine.predict(small.X, verbose=0), expected.predict(small.X, verbose=0), rtol=1e-4
    )


def test_several_outputs_and_an_uneven_batch(
    mirrored: tf.distribute.Strategy, tmp_path: Path
) -> None:
    """The losses of single outputs in History equal those of one process, too."""

    def two_outputs() -> keras.Model:
        keras.utils.set_random_seed(3)
        inputs = keras.Input((4,))
        outputs = {name: keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")}
        model = keras.Model(inputs, outputs)
        model.compile("sgd", {"a": "mse", "b": "mae"})
        return model

    targets = {"a": small.Y, "b": small.Y + 1}
    given = {"x": small.X, "y": targets, "batch_size": 8, "shuffle": False, "verbose": 0}
    expected = two_outputs().fit(**given).history
    found = kd.distributed_fit(
        two_outputs(), **given, directory=tmp_path, strategy=mirrored
    ).history
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, err_msg=name)


class Unmovable(keras.Model):
    """Has no `get_config`, and overrides `compile`."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(units)

    def compile(self) -> None:  # type: ignore[override]
        super().compile("sgd", "mse")

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)


def test_one_device_accepts_every_model(tmp_path: Path) -> None:
    """If the model need not be moved, any model that Keras can train is accepted."""
    model = Unmovable(1)
    model.compile()
    history = kd.distributed_fit(model, small.X, small.Y, directory=tmp_path, verbose=0)
    assert history.model is model


@keras.saving.register_keras_serializable("tests")
class OwnCompile(Subclass):
    """Keeps an argument of its `compile`, and passes the others on."""

    def compile(self, optimizer: Any = "auto", *, scale: float = 1.0, **more: Any) -> None:  # type: ignore[override]
        super().compile(optimizer=_default() if optimizer == "auto" else optimizer, **more)
        self.scale = scale

    def compute_loss(self, *given: Any, **more: Any) -> Any:
        return self.scale * super().compute_loss(*given, **more)


@keras.saving.register_keras_serializable("tests")
class Configured(OwnCompile):
    """Implements `get_compile_config` and `compile_from_config`."""

    def compile(self, factors: list[float]) -> None:  # type: ignore[override]
        super().compile("sgd", scale=factors[0] * factors[1], loss="mse")
        self._given = factors

    def get_compile_config(self) -> dict[str, Any]:
        return {"factors": self._given}

    def compile_from_config(self, config: dict[str, Any]) -> None:
        self.compile(config["factors"])


@keras.saving.register_keras_serializable("tests")
class TwoOptimizers(Subclass):
    """Trains its two layers with separate optimizers, passed to its `compile`."""

    def compile(self, first: Any, second: Any) -> None:  # type: ignore[override]
        super().compile(first, loss="mse")
        self.first, self.second = first, second

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        for optimizer, layer in ((self.first, self.hidden), (self.second, self.last)):
            weights = layer.trainable_weights
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def _default() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05)


def compiled(kind: type[keras.Model], *given: Any, **named: Any) -> keras.Model:
    keras.utils.set_random_seed(5)
    model = kind(8)
    model.compile(*given, **named)
    model(small.X[:1])
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: compiled(
            OwnCompile, scale=0.5, loss="mse", metrics=[keras.metrics.MeanSquaredError()]
        ),
        lambda: compiled(Configured, [0.5, 3.0]),
        lambda: compiled(TwoOptimizers, keras.optimizers.SGD(0.01), keras.optimizers.Adam(0.02)),
    ],
    ids=["keeps an argument", "says how", "two optimizers"],
)
def test_own_compile(make: Any, mirrored: tf.distribute.Strategy, tmp_path: Path) -> None:
    """A model that overrides `compile` is compiled again in the same way, and its optimizers' state
    is moved in both directions."""
    given = {"x": small.X, "y": small.Y, "batch_size": 10, "shuffle": False, "verbose": 0}
    expected, mine = make(), make()
    for model in (expected, mine):
        model.fit(**given)
    expected.fit(**given)
    kd.distributed_fit(mine, **given, directory=tmp_path, strategy=mirrored)
    close(mine, expected)
    for name in ("first", "second"):
        if hasattr(mine, name):
            assert getattr(mine, name).iterations.numpy() == 6


def test_xla_chosen_by_keras(
    mirrored: tf.distribute.Strategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If Keras chose XLA for a model because of a GPU, the model still trains without XLA under a
    strategy, like one created in its scope."""
    with monkeypatch.context() as patch:
        gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
        patch.setattr(tf.config, "list_physical_devices", lambda kind=None: [gpu])
        model = deterministic()
        assert model.jit_compile
    given = {"x": small.X, "y": small.Y, "batch_size": 10, "verbose": 0}
    history = kd.distributed_fit(model, **given, directory=tmp_path, strategy=mirrored)
    assert not history.model.jit_compile


def test_frozen_layers(mirrored: tf.distribute.Strategy, tmp_path: Path) -> None:
    """Layers frozen after their creation stay frozen, although no configuration records it."""
    given = {"x": small.X, "y": small.Y, "batch_size": 10, "shuffle": False, "verbose": 0}

    def frozen() -> keras.Model:
        model = subclass()
        model.hidden.trainable = False
        model.last.kernel.trainable = False
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    expected, mine = frozen(), frozen()
    expected.fit(**given)
    history = kd.distributed_fit(mine, **given, directory=tmp_path, strategy=mirrored)
    assert [each.trainable for each in history.model.weights] == [False, False, False, True]
    close(mine, expected)


@keras.saving.register_keras_serializable("tests")
class Vocabulary(keras.layers.Layer):
    """Saves its state in files, like a tokenizer."""

    words: tuple[str, ...] = ()

    def save_assets(self, folder: str) -> None:
        Path(folder, "words").mkdir()
        Path(folder, "words", "all.txt").write_text(" ".join(self.words))

    def load_assets(self, folder: str) -> None:
        self.words = tuple(Path(folder, "words", "all.txt").read_text().split())

    def call(self, inputs: Any) -> Any:
        return len(self.words) * inputs


def test_files_of_layers(mirrored: tf.distribute.Strategy, tmp_path: Path) -> None:
    """A layer's asset files are moved, too."""
    model = keras.Sequential([keras.Input((4,)), Vocabulary(), keras.layers.Dense(1)])
    model.layers[0].words = ("a", "b", "c")
    model.compile("sgd", "mse")
    given = {"x": small.X, "y": small.Y, "batch_size": 10, "verbose": 0}
    history = kd.distributed_fit(model, **given, directory=tmp_path, strategy=mirrored)
    assert history.model.layers[0].words == ("a", "b", "c")
    assert model.layers[0].words == ("a", "b", "c")


def test_one_device(tmp_path: Path) -> None:
    """On one device, the model is trained in place."""
    model = deterministic()
    history = kd.distributed_fit(model, small.X, small.Y, directory=tmp_path, verbose=0)
    assert history.model is model


@pytest.mark.parametrize("fault", [0, 1])
def test_resume_mirrored_run(fault: int, mirrored: tf.distribute.Strategy, tmp_path: Path) -> None:
    """An interrupted run on two replicas ends bit-identical to an uninterrupted one."""

    def fit(folder: str, *stop: small.Stop) -> keras.Model:
        model = deterministic()
        kd.distributed_fit(
            model,
            small.X,
            small.Y,
            batch_size=8,
            epochs=3,
            directory=tmp_path / folder,
            strategy=mirrored,
            callbacks=stop,
            verbose=0,
        )
        return model

    expected = fit("a")
    with pytest.raises(small.Interrupted):
        fit("b", small.Stop(1 + fault, fault))
    assert small.state(fit("b")) == small.state(expected)
