from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(400)]

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402
from keras.src.losses import loss as keras_loss  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.backend.tensorflow import trainer  # noqa: E402
from keras_distplug.backend.tensorflow.replicas import empty_batches  # noqa: E402
from keras_distplug.backend.tensorflow.runtime import private_names, progress_bars  # noqa: E402
from keras_distplug.backend.tensorflow.runtime.attached import is_marked  # noqa: E402
from keras_distplug.core import log  # noqa: E402


@pytest.fixture(autouse=True)
def stock() -> Iterator[None]:
    trainer.remove_dispatch()
    yield
    trainer.remove_dispatch()


def model() -> keras.Model:
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made


def test_dispatch_is_installed_on_first_use_and_removable() -> None:
    """Importing the package does not change Keras; `defaults()` installs the dispatch, once."""
    method = private_names.Trainer._maybe_symbolic_build
    kd.defaults("unused")
    dispatch = private_names.Trainer._maybe_symbolic_build
    assert dispatch is not method
    kd.defaults("unused")
    assert private_names.Trainer._maybe_symbolic_build is dispatch
    trainer.remove_dispatch()
    assert private_names.Trainer._maybe_symbolic_build is method
    trainer.remove_dispatch()
    assert private_names.Trainer._maybe_symbolic_build is method


def test_dispatch_leaves_other_models_alone() -> None:
    """A model that is not under MultiWorkerMirroredStrategy trains as in plain Keras."""
    trainer.install_dispatch()
    mine = model()
    mine.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    assert not is_marked(mine)


def test_one_device_runs_no_step_without_data() -> None:
    """Data of unknown length causes no additional step, as it does in plain Keras."""
    mine = model()
    assert kd.adapt(mine) is mine
    dataset = tf.data.Dataset.from_tensor_slices((np.ones((8, 2)), np.ones((8, 1)))).batch(4)
    mine.fit(dataset.filter(lambda *_: True), verbose=0)
    assert mine.optimizer.iterations.numpy() == 2


@pytest.fixture
def mirrored() -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.mark.parametrize("known", [True, False])
def test_one_device_with_xla(known: bool) -> None:
    """A step that XLA compiles is unchanged, and creates its variables when it first runs."""
    weights = []
    for adapted in (False, True):
        keras.utils.set_random_seed(0)
        mine = model()
        mine.compile("adam", "mse", metrics=["mae"], jit_compile=True)
        if adapted:
            kd.adapt(mine)
        data = tf.data.Dataset.from_tensor_slices((np.ones((5, 2)), np.ones((5, 1)))).batch(2)
        mine.fit(data if known else data.filter(lambda *_: True), epochs=2, verbose=0)
        assert mine.optimizer.iterations == 6
        weights.append(mine.get_weights())
    assert all(np.array_equal(a, b) for a, b in zip(*weights, strict=True))


def test_keras_is_restored(mirrored: tf.distribute.Strategy) -> None:
    """Keras' own modules are only patched while a step of an adapted model is traced."""
    places = [(private_names.nn, name) for name in empty_batches._OPERATIONS]
    places.append((keras_loss, "scale_loss_for_distribution"))
    stock = [getattr(*place) for place in places]
    seen = []

    class Looks(keras.layers.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            seen.append([getattr(*place) for place in places])
            return x

    with mirrored.scope():
        mine = keras.Sequential([keras.Input((2,)), Looks(), keras.layers.Dense(1)])
        mine.compile("sgd", "mse")
    one_for_two_replicas = (np.ones((1, 2)), np.ones((1, 1)))
    kd.adapt(mine).fit(*one_for_two_replicas, verbose=0)
    assert any(all(a is not b for a, b in zip(found, stock, strict=True)) for found in seen)
    assert all(getattr(*place) is function for place, function in zip(places, stock, strict=True))


@pytest.mark.parametrize("use", ["fit", "evaluate", "predict"])
def test_patches_only_for_empty_replicas(mirrored: tf.distribute.Strategy, use: str) -> None:
    """Keras is only patched for a batch that leaves a replica without samples."""
    stock, mended = private_names.nn.conv, []

    class Looks(keras.layers.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            if not isinstance(x, keras.KerasTensor) and private_names.nn.conv is not stock:
                mended.append(tf.shape(x)[0])
            return x

    with mirrored.scope():
        mine = keras.Sequential([keras.Input((4, 1)), Looks(), keras.layers.Conv1D(1, 2)])
        mine.compile("sgd", "mse")
    kd.adapt(mine)
    x, y = np.ones((9, 4, 1), "float32"), np.ones((9, 3, 1), "float32")
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    for taken, expected in ((2, False), (3, True), (2, True)):
        data = batches.take(taken).filter(lambda *_: True)
        before = len(mended)
        found = getattr(mine, use)(data, verbose=0)
        assert bool(mended) == expected
        assert taken != 2 or len(mended) == before
    assert use != "predict" or found.shape == (8, 3, 1)


def test_callbacks_adapt(mirrored: tf.distribute.Strategy, tmp_path: Path) -> None:
    """A plain `fit` under MirroredStrategy with our callbacks clips gradients like one process."""
    x, y = np.eye(6, 2, dtype="float32"), np.arange(6, dtype="float32")[:, None]
    made = []
    for scope in (tf.distribute.get_strategy().scope(), mirrored.scope()):
        with scope:
            keras.utils.set_random_seed(1)
            one = model()
            one.compile(keras.optimizers.SGD(0.1, clipnorm=0.01), "mse")
        one.fit(x, y, batch_size=4, verbose=0, callbacks=kd.defaults(tmp_path / str(len(made))))
        made.append(one)
    for alone, together in zip(*(m.weights for m in made), strict=True):
        np.testing.assert_allclose(alone.numpy(), together.numpy(), rtol=1e-5)


def test_other_models_are_unchanged(mirrored: tf.distribute.Strategy) -> None:
    """Only one model, its optimizer, losses and variables are adapted; no class is changed."""
    loss = keras.losses.MeanSquaredError()
    with mirrored.scope():
        mine, other = (
            keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
            for _ in range(2)
        )
        for each in (mine, other):
            each.compile(keras.optimizers.SGD(), loss, metrics=["mae"])
    classes = (type(mine), keras.optimizers.SGD, type(loss), keras.Variable, keras.layers.Dropout)
    before = [dict(vars(each)) for each in classes]
    kd.adapt(mine).fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    assert [dict(vars(each)) for each in classes] == before
    other.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    for part in (other, other.optimizer, loss, *other.layers, *other.variables):
        assert not is_marked(part)


def test_warning_about_uneven_batches(mirrored: tf.distribute.Strategy) -> None:
    """An uneven batch causes one warning with the numbers; an even batch causes none."""
    with mirrored.scope():
        uneven, even = model(), model()
    x, y = np.ones((15, 2)), np.ones((15, 1))
    with pytest.warns(UserWarning, match=r"of 5 samples .* by the 2 replicas .* of 4 or 6 is"):
        kd.adapt(uneven).fit(x, y, batch_size=5, verbose=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is not divisible.*")
        uneven.fit(x, y, batch_size=5, verbose=0)
        kd.adapt(even).fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(4), verbose=0)


def test_already_distributed_data(mirrored: tf.distribute.Strategy) -> None:
    """Data distributed by the user gives the same result as data distributed by Keras."""
    x = np.random.default_rng(0).normal(size=(16, 2)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1]))
    histories = []
    for given in (
        data.batch(4),
        mirrored.experimental_distribute_dataset(data.batch(4)),
        mirrored.distribute_datasets_from_function(lambda _: data.batch(2)),
    ):
        keras.utils.set_random_seed(1)
        with mirrored.scope():
            made = model()
        histories.append(kd.adapt(made).fit(given, epochs=2, verbose=0).history)
    assert histories == [histories[0]] * 3


@pytest.mark.parametrize(
    ("task", "verbose", "expected"),
    [
        (("worker", 0), "auto", 1),
        (("worker", 1), "auto", 0),
        (("worker", 1), 1, 0),
        (("worker", 1), 2, 2),
        (("worker", 1), 0, 0),
        (("chief", 0), 1, 1),
    ],
)
def test_progress_bar(
    task: tuple[str, int], verbose: Any, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under several workers, only the chief draws a progress bar; a line per epoch is printed by
    every worker."""
    trainer.install_dispatch()
    jobs = ["chief", "worker"] if task[0] == "chief" else ["worker"]
    spec = SimpleNamespace(jobs=jobs)
    resolver = SimpleNamespace(task_type=task[0], task_id=task[1], cluster_spec=lambda: spec)
    params = {"verbose": verbose, "epochs": 2, "steps": 3}
    for is_multi_worker in (True, False):
        monkeypatch.setattr(progress_bars, "is_multi_worker", lambda _: is_multi_worker)  # noqa: B023
        monkeypatch.setattr(progress_bars, "get_resolver", lambda _: resolver)
        bar = keras.callbacks.ProgbarLogger()
        bar.set_model(model())
        bar.set_params(params)
        assert bar.verbose == (expected if is_multi_worker else {"auto": 1}.get(verbose, verbose))


def test_message_in_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    """A message during an epoch starts on a new line, instead of at the end of the progress bar."""
    trainer.install_dispatch()
    handler = log._Handler(sys.stdout)
    logger = logging.Logger("keras_distplug")
    logger.addHandler(handler)

    def say_twice(batch: int, logs: Any) -> None:
        logger.info("in the epoch")
        logger.info("in the epoch, too")

    say = keras.callbacks.LambdaCallback(
        on_train_batch_end=say_twice,
        on_train_end=lambda logs: logger.info("after it"),
    )
    model().fit(np.ones((4, 2)), np.ones((4, 1)), batch_size=2, verbose=1, callbacks=[say])
    lines = capsys.readouterr().out.split("\n")
    assert lines.count("in the epoch") == 2
    assert lines[-2:] == ["after it", ""]
    assert "" not in lines[1:-1]


def test_no_warning_of_retracing(mirrored: tf.distribute.Strategy) -> None:
    """TensorFlow takes the first traces of several models for retracing if they share code."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    tf.get_logger().addHandler(handler)
    try:
        for _ in range(5):
            with mirrored.scope():
                mine = kd.adapt(model())
            mine.fit(np.ones((4, 2)), np.ones((4, 1)), batch_size=4, verbose=0)
    finally:
        tf.get_logger().removeHandler(handler)
    assert not [each for each in heard if "retracing" in each and "make_" not in each]
