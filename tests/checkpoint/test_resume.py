"""`distributed_fit` and `defaults()` in one process: stopped, restarted, finished, extended."""

from __future__ import annotations

import inspect
import logging
import shutil
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
from keras_distplug import default_callbacks  # noqa: E402
from keras_distplug.backend.tensorflow.input import epochs as compat_epochs  # noqa: E402
from keras_distplug.checkpoint import saver  # noqa: E402
from keras_distplug.core import log  # noqa: E402
from keras_distplug.core.errors import OtherRunError  # noqa: E402
from keras_distplug.core.events import Window  # noqa: E402
from keras_distplug.runlog import log_files  # noqa: E402
from keras_distplug.storage.files import open_files  # noqa: E402


@pytest.fixture(autouse=True)
def no_save_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training waits for every save, so that a slow machine skips none that is due."""
    stock = saver.Saver.start

    def start(self: saver.Saver, step: int, save: Callable[[], None]) -> None:
        stock(self, step, save)
        self.wait()

    monkeypatch.setattr(saver.Saver, "start", start)


def train(
    directory: Path,
    epochs: int = 4,
    stop: small.Stop | None = None,
    given: str = "arrays",
    **more: Any,
) -> tuple[keras.Model, keras.callbacks.History]:
    model = small.model()
    callbacks = [*more.pop("callbacks", []), *([stop] if stop else [])]
    history = kd.distributed_fit(
        model,
        **small.INPUTS[given](),
        epochs=epochs,
        directory=directory,
        save_freq="epoch",
        verbose=0,
        callbacks=callbacks,
        **more,
    )
    return model, history


def interrupt(directory: Path, epoch: int, batch: int, **more: Any) -> None:
    with pytest.raises(small.Interrupted):
        train(directory, stop=small.Stop(epoch, batch), **more)


@pytest.mark.parametrize("strategy", ["mirrored", "central_storage"])
def test_several_replicas(strategy: str, tmp_path: Path) -> None:
    """After an interruption on two replicas with separate dropout, training ends bit for bit the
    same."""
    expected, _ = train(tmp_path / "expected", strategy=strategy)
    interrupt(tmp_path / "run", 2, 1, strategy=strategy)
    found, history = train(tmp_path / "run", strategy=strategy)
    assert history.model.distribute_strategy.num_replicas_in_sync == 2
    assert small.state(found) == small.state(expected)


@pytest.mark.parametrize("given", small.INPUTS)
def test_interrupted(given: str, tmp_path: Path) -> None:
    """An interrupted run ends with bit for bit the same weights, optimizer, dropout, sample order
    and History as an uninterrupted one."""
    expected, history = train(tmp_path / "a", given=given)
    interrupt(tmp_path / "b", epoch=1, batch=2, given=given)
    interrupt(tmp_path / "b", epoch=3, batch=0, given=given)
    counted = small.Stop()
    resumed, resumed_history = train(tmp_path / "b", given=given, stop=counted)
    assert counted.batches == small.BATCHES
    assert small.state(resumed) == small.state(expected)
    assert resumed_history.history == history.history
    assert resumed_history.epoch == history.epoch == [0, 1, 2, 3]


def test_orders_differ_by_epoch(tmp_path: Path) -> None:
    """Arrays are shuffled again in every epoch, as in Keras."""
    seen: list[float] = []

    class Firsts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 0:
                seen.append(logs["loss"])

    model = small.model()
    model.compile(keras.optimizers.SGD(0.0), "mse")
    kd.distributed_fit(
        model,
        small.X,
        small.Y,
        batch_size=8,
        epochs=3,
        directory=tmp_path,
        save_freq="epoch",
        callbacks=[Firsts()],
    )
    assert len(set(seen)) == 3


def test_plain_fit(tmp_path: Path) -> None:
    """`model.fit(..., callbacks=kd.defaults(folder))` resumes where it stopped."""

    def fit(folder: str, *callbacks: keras.callbacks.Callback) -> keras.Model:
        model = small.model()
        model.fit(
            small.X,
            small.Y,
            epochs=3,
            shuffle=False,
            verbose=0,
            callbacks=[*kd.defaults(tmp_path / folder, save_freq="epoch"), *callbacks],
        )
        return model

    expected = fit("a")
    with pytest.raises(small.Interrupted):
        fit("b", small.Stop(2, 0))
    assert small.state(fit("b")) == small.state(expected)


@pytest.mark.parametrize("epochs", [3, 2])
def test_finished(epochs: int, tmp_path: Path) -> None:
    """A finished run immediately returns its History and weights, for as many epochs or fewer."""
    model, history = train(tmp_path, epochs=3)
    counted = small.Stop()
    again, stored = train(tmp_path, epochs=epochs, stop=counted)
    assert counted.batches == 0
    assert small.state(again) == small.state(model)
    assert stored.history == history.history
    assert stored.epoch == [0, 1, 2]


def test_stopped_early(tmp_path: Path) -> None:
    """A run that a callback ended is finished, including that callback's changes to the model."""

    def early() -> list[keras.callbacks.Callback]:
        return [
            keras.callbacks.EarlyStopping(
                "loss", patience=0, min_delta=100.0, restore_best_weights=True
            )
        ]

    model, history = train(tmp_path, epochs=9, callbacks=early())
    assert len(history.epoch) < 9
    counted = small.Stop()
    again, stored = train(tmp_path, epochs=9, callbacks=early(), stop=counted)
    assert counted.batches == 0
    assert small.state(again) == small.state(model)
    assert stored.history == history.history


def test_more_epochs(tmp_path: Path) -> None:
    """With more epochs, a finished run continues, and ends bit for bit like a run of that many
    epochs."""
    expected, history = train(tmp_path / "a", epochs=4)
    train(tmp_path / "b", epochs=2)
    counted = small.Stop()
    extended, extended_history = train(tmp_path / "b", epochs=4, stop=counted)
    assert counted.batches == 2 * small.BATCHES
    assert small.state(extended) == small.state(expected)
    assert extended_history.history == history.history


def test_saved_at_the_end_only(tmp_path: Path) -> None:
    """Without intermediate checkpoints, more epochs continue from the record of the end."""
    for epochs, batches in ((1, 4), (2, 4), (2, 0)):
        counted = small.Stop()
        model = small.model()
        callbacks = [*kd.defaults(tmp_path, save_freq=False), counted]
        model.fit(small.X, small.Y, batch_size=8, epochs=epochs, verbose=0, callbacks=callbacks)
        assert counted.batches == batches


def test_resume_false(tmp_path: Path) -> None:
    """`resume=False` starts a new run and leaves the old one unchanged."""
    train(tmp_path, epochs=2)
    before = {path: path.read_bytes() for path in tmp_path.glob("run-*/**/*") if path.is_file()}
    counted = small.Stop()
    train(tmp_path, epochs=2, stop=counted, resume=False)
    assert counted.batches == 2 * small.BATCHES
    assert {path: path.read_bytes() for path in before} == before
    assert sorted(path.name for path in tmp_path.glob("run-*")) == ["run-0001", "run-0002"]


def test_resume_false_under_a_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor starts the same script again; its own run is then continued nevertheless."""
    monkeypatch.setenv("KERAS_DISTPLUG_JOB", "job")
    monkeypatch.setenv("KERAS_DISTPLUG_ATTEMPT", "0")
    monkeypatch.setenv("KERAS_DISTPLUG_STATUS_DIR", str(tmp_path))
    runs = tmp_path / "runs"
    train(runs, epochs=1)
    monkeypatch.setenv("KERAS_DISTPLUG_JOB", "next job")
    interrupt(runs, epoch=1, batch=0, resume=False)
    counted = small.Stop()
    train(runs, epochs=2, resume=False, stop=counted)
    assert counted.batches == small.BATCHES
    assert len(list(runs.glob("run-*"))) == 2


@pytest.mark.parametrize("first", [True, False])
def test_place_among_callbacks(first: bool, tmp_path: Path) -> None:
    """A checkpoint includes the effects of other callbacks at an epoch's end, whatever their
    order."""

    class Shrink(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.5 ** (epoch + 1)

    def fit(folder: str, *stop: small.Stop) -> keras.Model:
        model = small.model()
        defaults = kd.defaults(tmp_path / folder, save_freq="epoch")
        callbacks = [*defaults, Shrink()] if first else [Shrink(), *defaults]
        model.fit(
            small.X, small.Y, epochs=3, shuffle=False, verbose=0, callbacks=[*callbacks, *stop]
        )
        return model

    expected = fit("a")
    with pytest.raises(small.Interrupted):
        fit("b", small.Stop(1, 0))
    assert small.state(fit("b")) == small.state(expected)


class Subclass(keras.Model):
    """A model without `build`, `get_config` or shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(3)
        self.dropout = keras.layers.Dropout(0.2)
        self.last = keras.layers.Dense(1)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.last(self.dropout(self.hidden(inputs), training=training))


def sequential() -> keras.Model:
    return keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])


@pytest.mark.parametrize("make", [sequential, Subclass])
def test_unbuilt_model(make: Callable[[], keras.Model], tmp_path: Path) -> None:
    """A model that Keras builds at its first batch is resumed, too, and returned when finished."""

    def fit(folder: str, *callbacks: keras.callbacks.Callback, seed: int = 2) -> keras.Model:
        keras.utils.set_random_seed(seed)
        model = make()
        model.compile("adam", "mse")
        model.fit(
            small.X,
            small.Y,
            epochs=3,
            shuffle=False,
            verbose=0,
            callbacks=[*kd.defaults(tmp_path / folder, save_freq="epoch"), *callbacks],
        )
        return model

    expected = fit("a")
    with pytest.raises(small.Interrupted):
        fit("b", small.Stop(2, 0))
    assert small.state(fit("b", seed=99)) == small.state(expected)
    counted = small.Stop()
    assert small.state(fit("b", counted, seed=99)) == small.state(expected)
    assert counted.batches == 0


@pytest.mark.parametrize("validation", [None, (small.X[:8], small.Y[:8])], ids=["", "validated"])
def test_unbuilt_metrics(validation: Any, tmp_path: Path) -> None:
    """Custom metrics start from zero after an epoch that is resumed after its last batch, although
    Keras resets none of a model that has not trained yet."""

    def fit(*callbacks: keras.callbacks.Callback) -> dict[str, list[float]]:
        keras.utils.set_random_seed(2)
        model = Subclass()
        model.compile("adam", "mse", metrics=[keras.metrics.MeanAbsoluteError()])
        given = {"validation_data": validation, "epochs": 2, "shuffle": False, "verbose": 0}
        return model.fit(small.X, small.Y, batch_size=8, callbacks=callbacks, **given).history

    backup = {"save_freq": small.BATCHES, "on_busy": "wait", "delete_checkpoint": False}
    expected = fit()
    with pytest.raises(small.Interrupted):
        fit(kd.BackupAndRestore(tmp_path, **backup), small.Stop(1, 0))
    counted = small.Stop()
    assert fit(kd.BackupAndRestore(tmp_path, **backup), counted) == expected
    assert counted.batches == small.BATCHES


def test_other_model(tmp_path: Path) -> None:
    """A folder with another model's run is refused with the difference, and stays unchanged."""
    train(tmp_path, epochs=1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("run-*/**/*") if path.is_file()}
    other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(9), keras.layers.Dense(1)])
    other.compile("adam", "mse")
    counted = small.Stop()
    with pytest.raises(OtherRunError, match=r"variable 1 is `.*kernel \[4, 8\].*\[4, 9\]"):
        kd.distributed_fit(other, small.X, small.Y, directory=tmp_path, callbacks=[counted])
    assert counted.batches == 0
    assert {
        path: path.read_bytes() for path in tmp_path.rglob("run-*/**/*") if path.is_file()
    } == before


def test_mid_epoch_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training resumes from a mid-epoch checkpoint; or from that epoch's start, with a message, if
    the position in the data is not known."""
    model = small.model()
    callbacks = [*kd.defaults(tmp_path / "run", save_freq=3), small.Stop(1, 3)]
    callbacks[0].saving = kd.Saving(on_busy="wait")
    with pytest.raises(small.Interrupted):
        model.fit(small.X, small.Y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    counted = small.Stop()
    callbacks = [*kd.defaults(tmp_path / "run", save_freq=3), counted]
    small.model().fit(small.X, small.Y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    assert counted.batches == small.BATCHES - 2
    assert "resuming at epoch 2/2, batch 3, step 6" in caplog.text
    counted = small.Stop()
    callbacks = [*kd.defaults(tmp_path / "copy", save_freq=3), counted]
    monkeypatch.setattr(compat_epochs, "get_loop", lambda: None)
    small.model().fit(small.X, small.Y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    assert counted.batches == small.BATCHES
    assert "saved after batch 2 of epoch" in caplog.text


def test_delete_checkpoint(tmp_path: Path) -> None:
    """Like Keras' own, BackupAndRestore deletes its folder at the end, and then starts from
    scratch, unless the folder holds something else."""
    for kept in (False, True):
        if kept:
            (tmp_path / "backup").mkdir()
            (tmp_path / "backup" / "notes.txt").touch()
        counted = small.Stop()
        callbacks = [kd.BackupAndRestore(tmp_path / "backup"), counted]
        small.model().fit(small.X, small.Y, epochs=2, verbose=0, callbacks=callbacks)
        assert counted.batches == 2
        assert [path.name for path in tmp_path.rglob("*")] == ["backup", "notes.txt"][: 2 * kept]


def test_constructor_of_keras() -> None:
    """The constructor accepts the arguments of `keras.callbacks.BackupAndRestore`, with their order
    and defaults."""
    keras_own = inspect.signature(keras.callbacks.BackupAndRestore).parameters
    ours = inspect.signature(kd.BackupAndRestore).parameters
    for (name, parameter), mine in zip(keras_own.items(), ours.items(), strict=False):
        assert mine[0] == name
        assert mine[1].default == parameter.default
    others = list(ours.values())[len(keras_own) :]
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in others)


def test_arguments_of_fit() -> None:
    """`distributed_fit` accepts the arguments of `Model.fit`, with their order and defaults."""
    keras_own = list(inspect.signature(keras.Model.fit).parameters.values())[1:]
    ours = list(inspect.signature(kd.distributed_fit).parameters.values())[1:]
    assert [(p.name, p.default) for p in ours[: len(keras_own)]] == [
        (p.name, p.default) for p in keras_own
    ]


def test_nan(tmp_path: Path) -> None:
    """A run whose last loss is not finite is neither recorded as finished nor deleted."""

    class Poison(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                self.model.layers[-1].bias.assign([np.nan])

    for backup in (
        kd.defaults(tmp_path, save_freq="epoch")[0],
        kd.BackupAndRestore(tmp_path, delete_checkpoint=True),
    ):
        backup.saving = kd.Saving(on_busy="wait")
        small.model().fit(small.X, small.Y, epochs=3, verbose=0, callbacks=[Poison(), backup])
        kept = sorted(path.name for path in (tmp_path / "run-0001").iterdir() if path.is_dir())
        assert kept == ["step-00000001", "step-00000002"]
        assert (tmp_path / "run-0001" / "RUN.json").exists()


def test_with_tensorboard(tmp_path: Path) -> None:
    """Keras' TensorBoard callback writes its events next to it."""
    train(tmp_path / "run", epochs=1, callbacks=[keras.callbacks.TensorBoard(tmp_path / "logs")])
    [events] = (tmp_path / "logs" / "train").glob("events.out.*")
    tags = [
        value.tag
        for event in tf.compat.v1.train.summary_iterator(str(events))
        for value in event.summary.value
    ]
    assert "epoch_loss" in tags


def test_reused_callbacks(tmp_path: Path) -> None:
    """A list of callbacks can be used for several calls of `fit`."""
    callbacks = kd.defaults(tmp_path, save_freq="epoch")
    model = small.model()
    for epochs in (1, 2):
        history = model.fit(small.X, small.Y, epochs=epochs, verbose=0, callbacks=callbacks)
    assert history.epoch == [0, 1]


def test_steps_per_execution(tmp_path: Path) -> None:
    """Several steps per execution are counted correctly."""

    def fit(folder: str, *stop: keras.callbacks.Callback) -> keras.Model:
        model = small.model()
        model.compile("adam", "mse", steps_per_execution=3)
        kd.distributed_fit(
            model,
            small.X,
            small.Y,
            batch_size=8,
            epochs=2,
            directory=tmp_path / folder,
            save_freq="epoch",
            callbacks=stop,
        )
        return model

    expected = fit("a")
    [manifest, _] = sorted((tmp_path / "a" / "run-0001").glob("step-*"))
    assert manifest.name == "step-00000004"

    class StopAtOnce(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise small.Interrupted

    with pytest.raises(small.Interrupted):
        fit("b", StopAtOnce())
    assert small.state(fit("b")) == small.state(expected)


@pytest.mark.parametrize("kind", ["one", "compiled", "mirrored"])
@pytest.mark.parametrize(
    ("data", "steps_per_epoch"), [("unknown length", None), ("endless", 4)], ids=["unknown", "more"]
)
def test_counts_trained_steps(
    kind: str, data: str, steps_per_epoch: int | None, tmp_path: Path
) -> None:
    """An execution trains fewer steps if data of unknown length ends, and more than an epoch should
    have if it does not: checkpoints and the log count the steps that were trained."""
    made = (
        small.dataset().repeat() if data == "endless" else small.dataset().filter(lambda *_: True)
    )
    chosen = tf.distribute.get_strategy()
    if kind == "mirrored":
        chosen = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with chosen.scope():
        model = small.model()
        model.compile("adam", "mse", steps_per_execution=3, jit_compile=kind == "compiled")
    epochs = 2
    callbacks = [*kd.defaults(tmp_path, save_freq="epoch"), small.Stop()]
    model.fit(made, epochs=epochs, steps_per_epoch=steps_per_epoch, verbose=0, callbacks=callbacks)
    trained = epochs * (6 if data == "endless" else 4)
    assert int(model.optimizer.iterations.numpy()) == trained
    [run] = tmp_path.glob("run-*")
    found = sorted(each.name for each in run.glob("step-*"))
    assert found == [f"step-{trained // 2:08}", f"step-{trained:08}"]
    log_files._close_all()
    [log], _ = log_files.read(open_files(tmp_path), run.name)
    windows = [each.event for each in log.entries if isinstance(each.event, Window)]
    assert sum(each.steps for each in windows) == trained


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("", "interactive"),
        ("-c", "interactive"),
        ("/x/ipykernel_launcher.py", "interactive"),
        ("/x/package/__main__.py", "package"),
        ("train.v2.py", "train.v2"),
    ],
)
def test_name_of_the_script(script: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default directory is named after the script."""
    monkeypatch.setattr("sys.argv", [script])
    assert default_callbacks.default_directory() == Path("keras_distplug_runs") / name


def test_more_epochs_after_an_early_end(tmp_path: Path) -> None:
    """A run that a callback ended continues when it is given more epochs."""

    class EndAfterTwo(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = epoch == 1

    expected, _ = train(tmp_path / "a", epochs=4)
    train(tmp_path / "b", epochs=3, callbacks=[EndAfterTwo()])
    counted = small.Stop()
    extended, history = train(tmp_path / "b", epochs=4, stop=counted)
    assert counted.batches == 2 * small.BATCHES
    assert history.epoch == [0, 1, 2, 3]
    assert small.state(extended) == small.state(expected)


class TwoOptimizers(keras.Model):
    """Trains every one of its layers with a separate optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = keras.layers.Dense(3)
        self.last = keras.layers.Dense(1)

    def compile(self, other: keras.optimizers.Optimizer, **more: Any) -> None:  # type: ignore[override]
        super().compile(**more)
        self.other = other

    def call(self, inputs: Any) -> Any:
        return self.last(self.first(inputs))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        for optimizer, layer in ((self.optimizer, self.first), (self.other, self.last)):
            variables = layer.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


def two_optimizers() -> keras.Model:
    model = TwoOptimizers()
    model.compile(other=keras.optimizers.Adam(0.1), optimizer="sgd", loss="mse")
    return model


def mixed_precision() -> keras.Model:
    layers = [keras.Input((4,)), keras.layers.Dense(3, dtype="mixed_float16")]
    model = keras.Sequential([*layers, keras.layers.Dense(1, dtype="float32")])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)), "mse")
    return model


def normalized() -> keras.Model:
    normalization = keras.layers.Normalization()
    normalization.adapt(10 * small.X + 3)
    model = keras.Sequential([keras.Input((4,)), normalization, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


@keras.saving.register_keras_serializable("tests")
class Noise(keras.layers.Layer):
    """Draws from the global generator of Keras."""

    def call(self, x: Any, training: bool = False) -> Any:
        return x + keras.random.normal(keras.ops.shape(x)) if training else x


def drawn_without_a_seed() -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), Noise(), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize(
    "make", [two_optimizers, mixed_precision, normalized, drawn_without_a_seed]
)
def test_unusual_models(make: Callable[[], keras.Model], tmp_path: Path) -> None:
    """Unusual models resume as well: optimizers for a part of the model, several of them, wrapped
    ones, adapted layers."""

    def fit(folder: str, *stop: small.Stop) -> keras.Model:
        keras.backend.clear_session()  # also resets the generator of `keras.random`
        keras.utils.set_random_seed(4)
        model = make()
        given = {"x": small.X, "y": small.Y, "batch_size": 8, "epochs": 3, "verbose": 0}
        kd.distributed_fit(
            model, **given, directory=tmp_path / folder, save_freq="epoch", callbacks=stop
        )
        return model

    expected = fit("a")
    with pytest.raises(small.Interrupted):
        fit("b", small.Stop(1, 1))
    found = fit("b")
    assert small.state(found) == small.state(expected)
    others = [model.other.variables for model in (found, expected) if hasattr(model, "other")]
    assert all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(*others, strict=True))
    predicted = [model.predict(small.X, verbose=0).tobytes() for model in (found, expected)]
    assert predicted[0] == predicted[1]


def test_advice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Suggestions for the data are printed once, unless output is disabled; if TensorFlow does not
    prefetch, a batch is prefetched."""
    log.advise.cache_clear()
    logger = logging.getLogger("keras_distplug.advice")
    options = tf.data.Options()
    options.autotune.enabled = False
    trained = []
    try:
        for number, is_tuned in enumerate((False, True, False)):
            if number == 2:
                log.advise.cache_clear()
                logger.setLevel(logging.WARNING)
            model = small.model()
            data = tf.data.Dataset.from_tensor_slices((small.X, small.Y)).batch(8)
            data = data.shuffle(4, seed=1)
            data = data if is_tuned else data.with_options(options)
            kd.distributed_fit(model, data, verbose=0, directory=tmp_path / str(number))
            trained.append(small.state(model))
            # One handler may get a record twice.
            said = {id(each): each.getMessage() for each in caplog.records}.values()
            about = [each.split("`")[1] for each in said if each.startswith("advice: ")]
            assert about == ["shuffle", "options.autotune.enabled=False"]
    finally:
        logger.setLevel(logging.NOTSET)
    assert trained[0] == trained[1] == trained[2]
