"""Export to Keras' own files, by the command and by the callback."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
import numpy as np  # noqa: E402
import safetensors.numpy  # noqa: E402
import tensorflow as tf  # noqa: E402
from commands import made  # noqa: E402
from commands.conftest import Ask  # noqa: E402
from storage.checkpoints import RUN  # noqa: E402
from support import small  # noqa: E402
from support.cluster import environment  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.checkpoint import (  # noqa: E402
    capture,
    model_export,
)
from keras_distplug.core.errors import (  # noqa: E402
    ConfigurationError,
    CorruptCheckpointError,
    ModelError,
    NoCheckpointError,
    OtherRunError,
)
from keras_distplug.storage import architecture, export_file, runs  # noqa: E402
from keras_distplug.storage.files import open_files  # noqa: E402
from keras_distplug.storage.store import CheckpointStore  # noqa: E402
from keras_distplug.storage.stores.local import LocalFiles  # noqa: E402

Say = Callable[..., tuple[int, str]]
FORMATS = ("model.keras", "model.weights.h5", "model.safetensors")


def fit(
    directory: Path,
    *callbacks: keras.callbacks.Callback,
    model: keras.Model | None = None,
    backup: keras.callbacks.Callback | None = None,
    epochs: int = 2,
    **arguments: Any,
) -> keras.Model:
    model = model or small.model()
    given = {"delete_checkpoint": False, "keep_last": 9, **arguments}
    kept = backup or kd.BackupAndRestore(directory, **given)
    model.fit(
        small.X, small.Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0,
        callbacks=[kept, *callbacks],
    )  # fmt: skip
    return model


def state(model: keras.Model) -> list[bytes]:
    """Returns the bits of all that Keras' files contain; they lack the states of generators."""
    return [v.numpy().tobytes() for v in [*model.weights, *model.optimizer.variables]]


def state_in(file: Path) -> list[bytes]:
    return state(keras.models.load_model(file))


class AtStep(keras.callbacks.Callback):  # type: ignore[misc]
    """Calls a function at the end of some steps, counted from 1."""

    def __init__(self, action: Callable[[], object], *steps: int) -> None:
        super().__init__()
        self.action, self.steps, self.step, self.calls = action, steps, 0, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.step += 1
        if self.step in self.steps:
            self.action()
            self.calls += 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, keras.Model]:
    directory = tmp_path_factory.mktemp("trained")
    return directory, fit(directory)


# The command


def test_keras(trained: tuple[Path, keras.Model], tmp_path: Path, ask: Ask) -> None:
    """The .keras file is the whole model: weights, optimizer's state, and how it was compiled."""
    directory, model = trained
    out = tmp_path / "model.keras"
    code, told = ask("export", directory, out)
    assert (code, told["format"], told["checkpoint"]) == (0, "keras", "final-00000008")
    loaded = keras.models.load_model(out)
    assert state(loaded) == state(model)
    assert loaded.optimizer.iterations.numpy() == 2 * small.BATCHES
    assert np.array_equal(loaded.predict(small.X, verbose=0), model.predict(small.X, verbose=0))
    assert loaded.evaluate(small.X, small.Y, verbose=0) == model.evaluate(
        small.X, small.Y, verbose=0
    )


def test_weights(trained: tuple[Path, keras.Model], tmp_path: Path, ask: Ask) -> None:
    """The .weights.h5 file can be loaded into a new model, also under another name."""
    directory, model = trained
    ask("export", directory, tmp_path / "last", "--format", "weights.h5")
    os.rename(tmp_path / "last", tmp_path / "last.weights.h5")
    fresh = small.model(seed=99)
    fresh.load_weights(tmp_path / "last.weights.h5")
    assert np.array_equal(fresh.predict(small.X, verbose=0), model.predict(small.X, verbose=0))


def test_safetensors(trained: tuple[Path, keras.Model], tmp_path: Path, ask: Ask) -> None:
    """The .safetensors file has the values of `model.variables`."""
    directory, model = trained
    ask("export", directory, tmp_path / "w.safetensors")
    found = safetensors.numpy.load_file(tmp_path / "w.safetensors")
    assert "model/sequential/dense/kernel" in found or len(found) == len(model.weights) + 1
    variables = capture.list_variables(model)
    expected = [v.numpy().tobytes() for key, v in variables.items() if key.startswith("model/")]
    assert sorted(value.tobytes() for value in found.values()) == sorted(expected)


def test_older_step(tmp_path: Path, ask: Ask) -> None:
    """A step in mid-training is exported with its own values."""
    then: list[bytes] = []
    model = small.model()
    fit(tmp_path, AtStep(lambda: then.extend(state(model)), 3), model=model, save_freq=3)
    ask("export", tmp_path, tmp_path / "model.keras", "--step", "3")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert state(loaded) == then
    assert state(model) != then


def functional() -> keras.Model:
    inputs = keras.Input((4,))
    shared = keras.layers.Dense(4, activation="tanh")
    outputs = keras.layers.Dense(1)(shared(keras.layers.BatchNormalization()(shared(inputs))))
    return keras.Model(inputs, outputs)


def deferred() -> keras.Model:
    return keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])


def partly_frozen() -> keras.Model:
    made = functional()
    made.layers[1].trainable = False
    return made


def in_bfloat16() -> keras.Model:
    dense = keras.layers.Dense(4, dtype="bfloat16")
    return keras.Sequential([keras.Input((4,)), dense, keras.layers.Dense(1)])


def mixed() -> keras.Model:
    layers = [keras.layers.Dense(4, dtype="mixed_float16"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((4,)), *layers])


def normalizing() -> keras.Model:
    layer = keras.layers.Normalization()
    layer.adapt(small.X)
    return keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(1)])


@pytest.mark.parametrize(
    "make", [functional, deferred, partly_frozen, in_bfloat16, mixed, normalizing]
)
@pytest.mark.parametrize("optimizer", ["adamw", "scaled", "scheduled"])
def test_kinds_of_models(
    make: Callable[[], keras.Model], optimizer: str, tmp_path: Path, ask: Ask
) -> None:
    """Models and optimizers of all kinds are restored bit for bit."""
    keras.utils.set_random_seed(1)
    model = make()
    chosen = {
        "adamw": lambda: "adamw",
        "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
        "scheduled": lambda: keras.optimizers.SGD(
            keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5), momentum=0.9
        ),
    }[optimizer]()
    model.compile(chosen, "mse")
    fit(tmp_path, model=model)
    code, told = ask("export", tmp_path, tmp_path / "model.keras")
    assert code == 0, told
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert state(loaded) == state(model)
    assert np.array_equal(loaded.predict(small.X, verbose=0), model.predict(small.X, verbose=0))


OWN = """
import keras

@keras.saving.register_keras_serializable("own")
class Twice(keras.layers.Layer):
    def call(self, x):
        return 2 * x

@keras.saving.register_keras_serializable("own")
class Own(keras.Model):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.twice = Twice()
        self.dense, self.last = keras.layers.Dense(units), keras.layers.Dense(1)

    def call(self, x):
        return self.last(self.dense(self.twice(x)))

    def get_config(self):
        return {**super().get_config(), "units": self.units}
"""
TRAIN = """
import sys
import keras_distplug as kd
from support import small
from own import Own

model = Own(3)
model.compile("adam", "mse")
backup = kd.BackupAndRestore("runs", delete_checkpoint=False)
model.fit(small.X, small.Y, batch_size=8, epochs=1, verbose=0, callbacks=[backup])
model.save_weights("expected.weights.h5")
model.save("expected.keras")
"""


def test_own_classes(tmp_path: Path) -> None:
    """Custom classes are found if their module is imported; otherwise, the error asks for it."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "train.py").write_text(TRAIN)

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command],
            env=environment(),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    done = run("train.py")
    assert done.returncode == 0, done.stderr
    # As pip installs it: the working folder is not where Python looks.
    script = (
        "import sys; sys.path.remove(''); from keras_distplug.cli import main; sys.exit(main())"
    )
    command = ("-c", script, "export", "runs")
    without = run(*command, "model.keras")
    assert without.returncode == 2
    assert "could not be rebuilt" in without.stderr
    assert "--import MODULE" in without.stderr
    assert "Traceback" not in without.stderr
    wrong = run(*command, "model.keras", "--import", "nothing_like_it")
    assert wrong.returncode == 2
    assert "--import nothing_like_it failed" in wrong.stderr
    assert not list(tmp_path.glob("*model*"))
    for out in ("model.keras", "model.weights.h5"):
        done = run(*command, out, "--import", "own")
        assert done.returncode == 0, done.stderr
    check = (
        "import keras, own, numpy as np\n"
        "a, b = (keras.models.load_model(f'{name}.keras') for name in ('expected', 'model'))\n"
        "for one, other in zip(a.variables + a.optimizer.variables,\n"
        "                      b.variables + b.optimizer.variables, strict=True):\n"
        "    assert np.array_equal(one, other)\n"
        "a.load_weights('model.weights.h5')\n"
        "print(len(b.weights))"
    )
    done = run("-c", check)
    assert done.stdout == "4\n", done.stderr


def unserializable() -> keras.Model:
    class Hidden(keras.Model):  # type: ignore[misc]
        def __init__(self, dense: object) -> None:
            super().__init__()
            self.dense = dense

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def get_config(self) -> Any:
            raise TypeError("I will not tell")

    model = Hidden(keras.layers.Dense(1))
    model.compile("adam", "mse")
    return model


def test_undescribable_model(tmp_path: Path, say: Say) -> None:
    """Training continues without MODEL.json; the command names an alternative, which works."""
    runs_, model = tmp_path / "runs", unserializable()
    backup = kd.BackupAndRestore(runs_, delete_checkpoint=False)
    fit(runs_, model=model, backup=backup)
    assert not (runs_ / RUN / "MODEL.json").exists()
    code, printed = say("export", runs_, tmp_path / "w.weights.h5")
    assert code == 3
    assert "does not contain the architecture of the model" in printed
    assert "`export(path)` of the BackupAndRestore" in printed
    assert say("export", runs_, tmp_path / "w.safetensors")[0] == 0
    backup.export(tmp_path / "w.weights.h5")
    fresh = unserializable()
    fresh(small.X[:1])
    fresh.load_weights(tmp_path / "w.weights.h5")
    assert np.array_equal(fresh.predict(small.X, verbose=0), model.predict(small.X, verbose=0))


def test_lambdas_are_not_loaded(tmp_path: Path, say: Say) -> None:
    """Code in a checkpoint's folder is never run."""
    doubled = keras.layers.Lambda(lambda x: 2 * x, output_shape=(4,))
    model = keras.Sequential([keras.Input((4,)), doubled, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    fit(tmp_path / "runs", model=model)
    code, printed = say("export", tmp_path / "runs", tmp_path / "model.keras")
    assert code == 2
    assert "class Lambda" in printed
    assert os.listdir(tmp_path) == ["runs"]


def test_failing_disk_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If MODEL.json cannot be written, training warns and continues."""
    stock = LocalFiles.create

    def create(self: LocalFiles, path: str, parts: Any) -> None:
        if path.endswith("MODEL.json"):
            raise OSError("no")
        stock(self, path, parts)

    monkeypatch.setattr(LocalFiles, "create", create)
    with pytest.warns(UserWarning, match=r"MODEL.json could not be written: no"):
        fit(tmp_path)
    assert (tmp_path / RUN / "final-00000008" / "MANIFEST.json").exists()


# Stored model descriptions


def wide(activation: str) -> keras.Model:
    keras.utils.set_random_seed(2)
    layers = [keras.layers.Dense(4, activation=activation), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,), name="in"), *layers], name="wide")
    model.compile("sgd", "mse")
    return model


def test_changed_model(tmp_path: Path, ask: Ask) -> None:
    """A model changed without any change of its variables is stored next to the previous one, and
    every checkpoint is exported with its own model."""
    for epochs, activation in ((1, "tanh"), (2, "tanh"), (3, "relu")):
        keras.backend.clear_session()
        fit(tmp_path, model=wide(activation), epochs=epochs)
    found = [name for _, name in sorted((len(n), n) for n in os.listdir(tmp_path / RUN))]
    assert [name for name in found if name.startswith("MODEL")] == ["MODEL.json", "MODEL-2.json"]
    for step, activation in ((4, "tanh"), (8, "tanh"), (12, "relu")):
        out = tmp_path / f"{step}.keras"
        assert ask("export", tmp_path, out, "--step", step)[0] == 0
        assert keras.models.load_model(out).layers[0].activation.__name__ == activation


def test_model_of_an_empty_run(tmp_path: Path, ask: Ask) -> None:
    """A run whose first model left no checkpoint belongs to the next model."""
    with pytest.raises(small.Interrupted):
        fit(tmp_path, small.Stop(0, 0), model=wide("tanh"))
    keras.backend.clear_session()
    fit(tmp_path, model=wide("relu"))
    assert ask("export", tmp_path, tmp_path / "a.keras", "--step", 4)[0] == 0
    assert keras.models.load_model(tmp_path / "a.keras").layers[0].activation.__name__ == "relu"


def test_damaged_model_file(tmp_path: Path, say: Say) -> None:
    """A modified MODEL.json is not used; the next training writes a new one."""
    fit(tmp_path, model=wide("tanh"))
    file = tmp_path / RUN / "MODEL.json"
    file.write_text(file.read_text().replace("tanh", "relu"))
    code, printed = say("export", tmp_path, tmp_path / "a.keras")
    assert code == 1
    assert "MODEL.json is damaged" in printed
    keras.backend.clear_session()
    fit(tmp_path, model=wide("tanh"), epochs=3)
    assert (tmp_path / RUN / "MODEL-2.json").exists()


def test_weights_sized_by_an_input(trained: tuple[Path, keras.Model]) -> None:
    """Weights larger than the checkpoint are refused before memory is allocated, also if their size
    is not in the model's description."""
    files = open_files(trained[0])
    stored = CheckpointStore(files, RUN).read("final-00000008")
    model = json.loads(json.dumps(architecture.recall(files, RUN, 8).model))
    for each in model["config"]["layers"]:
        each.pop("build_config", None)
        if each["class_name"] == "InputLayer":
            each["config"]["batch_shape"] = [None, 2**28]
    tracked = keras.Variable._validate_shape
    with pytest.raises(ModelError, match="with it, the model would have more values"):
        model_export.save_rebuilt(model, stored.manifest, stored.values, Path("a.keras"))
    assert keras.Variable._validate_shape is tracked


def test_other_model_in_the_file(tmp_path: Path) -> None:
    """A model that does not match the checkpoint is refused with the first difference."""
    fit(tmp_path, model=wide("tanh"))
    files = open_files(tmp_path)
    stored = CheckpointStore(files, RUN).read("final-00000008")
    other = model_export.get_architecture(small.model())
    assert other is not None
    with pytest.raises(OtherRunError, match="First difference: "):
        model_export.save_rebuilt(other, stored.manifest, stored.values, tmp_path / "a.keras")
    assert not (tmp_path / "a.keras").exists()


# The callback


@pytest.mark.parametrize("out", FORMATS)
@pytest.mark.parametrize("rebuilt", [False, True])
def test_export_leaves_training_unchanged(
    out: str, rebuilt: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training that exports in its middle ends in the same bits as one that does not: weights,
    optimizer, History, and the random numbers of Python and Keras."""
    if rebuilt:  # as on several workers

        def save(model: keras.Model, *given: Any) -> None:
            made_from = model_export.get_architecture(model)
            assert made_from is not None
            model_export.save_rebuilt(made_from, *given)

        monkeypatch.setattr(model_export, "save_through", save)
    ended = []
    for exports in (False, True):
        keras.backend.clear_session()  # Keras 3.10 keeps the generator of `keras.random` otherwise
        backup = kd.BackupAndRestore(
            tmp_path / str(exports), save_freq=2, delete_checkpoint=False, keep_last=9
        )
        action = AtStep(
            lambda exports=exports, backup=backup: exports
            and backup.export(tmp_path / out, step=2, overwrite=True),
            3, 6,
        )  # fmt: skip
        model = fit(tmp_path, action, backup=backup)
        assert action.calls == 2
        ended.append(
            (small.state(model), model.history.history, random.random(),
             keras.random.uniform((2,)).numpy().tobytes())
        )  # fmt: skip
    assert (tmp_path / out).exists()
    assert ended[0] == ended[1]


def test_export_of_every_kind(tmp_path: Path) -> None:
    """The callback exports a step, the best one and the newest one: after training, and before
    training in a new process."""
    qualities = iter([0.5, 0.1, 0.4])

    class Judge(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["quality"] = next(qualities)
            states[epoch + 1] = state(self.model)

    states: dict[int, list[bytes]] = {}
    arguments = {"delete_checkpoint": False, "keep_last": 9, "on_busy": "wait"}
    arguments |= {"keep_best": ("quality", "min", 1)}
    backup = kd.BackupAndRestore(tmp_path / "runs", **arguments)
    fit(tmp_path, Judge(), backup=backup, epochs=3)
    fresh = kd.BackupAndRestore(tmp_path / "runs", **arguments)
    for number, callback in enumerate((backup, fresh)):
        for step, epoch in ((4, 1), ("best", 2), (None, 3), ("step-00000008", 2)):
            out = tmp_path / f"{number}-{step}.keras"
            callback.export(out, step=step)
            assert state_in(out) == states[epoch]
    with pytest.raises(ConfigurationError, match="exists"):
        backup.export(tmp_path / "0-best.keras")
    with pytest.raises(NoCheckpointError, match="no complete checkpoint 5"):
        backup.export(tmp_path / "a.keras", step=5)


def test_newest_in_mid_training(tmp_path: Path) -> None:
    """The newest checkpoint may still be in progress: the export waits for it."""
    model, backup = small.model(), kd.BackupAndRestore(tmp_path / "runs")
    at_epoch_end: list[bytes] = []
    out = tmp_path / "newest.keras"

    class First(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 0:
                at_epoch_end.extend(state(model))

    action = AtStep(lambda: backup.export(out), small.BATCHES + 1)
    fit(tmp_path, First(), action, model=model, backup=backup)
    assert action.calls == 1
    assert state_in(out) == at_epoch_end


def test_nothing_to_export(tmp_path: Path) -> None:
    """Missing checkpoints are reported, whether they do not exist yet or were deleted."""
    backup = kd.BackupAndRestore(tmp_path / "runs")
    with pytest.raises(NoCheckpointError, match="holds no run to export"):
        backup.export(tmp_path / "a.keras")
    failed = []

    def early() -> None:
        with pytest.raises(NoCheckpointError, match="contains no complete checkpoint"):
            backup.export(tmp_path / "a.keras")
        failed.append(True)

    fit(tmp_path, AtStep(early, 1), backup=backup)
    assert failed
    with pytest.raises(NoCheckpointError, match="use delete_checkpoint=False"):
        backup.export(tmp_path / "a.keras")
    assert not (tmp_path / "a.keras").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a.txt",), "endings .keras"),
        (("a.keras", "best"), "requires a metric"),
        (("a.keras", None, "h5"), "Expected `format`"),
        (("none/a.keras",), "in a folder that exists"),
    ],
)
def test_bad_arguments(
    arguments: tuple[Any, ...], message: str, trained: tuple[Path, keras.Model]
) -> None:
    """Bad arguments are reported before anything is read or written."""
    backup = kd.BackupAndRestore(trained[0])
    with pytest.raises(ConfigurationError, match=message):
        backup.export(*arguments)


@pytest.mark.parametrize("fault", ["save", "damage"])
def test_failed_export(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If saving fails, or the checkpoint is damaged, training gets its own values back, and no file
    remains."""
    expected = small.state(fit(tmp_path / "expected"))
    directory, out = tmp_path / "runs", tmp_path / "a.keras"
    arguments = {"delete_checkpoint": False, "keep_last": 9, "on_busy": "wait"}
    backup = kd.BackupAndRestore(directory, save_freq=2, **arguments)
    model = small.model()
    failed = []

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no room")

    def action() -> None:
        before = small.state(model)
        if fault == "damage":
            made.HARM["flipped"][0](directory / RUN / "step-00000002")
            with pytest.raises(CorruptCheckpointError):
                backup.export(out, step=2)
        else:
            with monkeypatch.context() as patched:
                patched.setattr(keras.Sequential, "save", fail)
                with pytest.raises(kd.errors.CheckpointError, match="no room"):
                    backup.export(out, step=2)
        assert small.state(model) == before
        failed.append(fault)

    fit(directory, AtStep(action, 5), model=model, backup=backup)
    assert failed
    assert not out.exists()
    assert small.state(model) == expected


def test_under_a_strategy(tmp_path: Path) -> None:
    """A model with several replicas can be exported in mid-training without side effects."""
    ended = []
    for exports in (False, True):
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            model = small.model()
        backup = kd.BackupAndRestore(tmp_path / str(exports), save_freq=2, delete_checkpoint=False)
        out = tmp_path / "a.keras"
        action = AtStep(
            lambda exports=exports, backup=backup, out=out: exports and backup.export(out), 3
        )
        fit(tmp_path, action, model=model, backup=backup)
        ended.append(small.state(model))
    assert ended[0] == ended[1]
    loaded = keras.models.load_model(tmp_path / "a.keras")
    assert loaded.optimizer.iterations.numpy() == 2


def test_inside_a_scope(tmp_path: Path) -> None:
    """A model is not rebuilt inside the scope of a strategy, which it would join."""
    fit(tmp_path)
    backup = kd.BackupAndRestore(tmp_path)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope(), pytest.raises(ConfigurationError, match="within the scope"):
        backup.export(tmp_path / "a.keras")


def test_model_error_is_a_configuration_error(trained: tuple[Path, keras.Model]) -> None:
    """A model that Keras cannot rebuild is reported as such."""
    stored = CheckpointStore(open_files(trained[0]), RUN).read("final-00000008")
    with pytest.raises(ModelError, match="could not be rebuilt"):
        model_export.save_rebuilt(
            {"class_name": "Nothing", "config": {}}, stored.manifest, stored.values, Path("a.keras")
        )


# `ls` and `fit` agree


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_resumed_checkpoint(
    epochs: int, tmp_path: Path, ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    """`fit` resumes from the checkpoint that `ls` marks for its `epochs`."""
    fit(tmp_path, epochs=2)
    marked = {
        each["taken_by"]: each["name"]
        for each in ask("ls", tmp_path)[1]["runs"][0]["checkpoints"]
        if each["taken_by"]
    }
    assert marked.keys() == {"epochs <= 2", "epochs > 2"}
    expected = marked["epochs <= 2" if epochs <= 2 else "epochs > 2"]
    script = (
        "import sys; from commands.test_exporting_models import fit\n"
        "from pathlib import Path; fit(Path(sys.argv[1]), epochs=int(sys.argv[2]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), str(epochs)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert f"checkpoint {expected}: " in done.stdout


def test_stored_architecture_is_read_back(trained: tuple[Path, keras.Model]) -> None:
    """MODEL.json carries a SHA-256 of itself and is read back as it was."""
    files = open_files(trained[0])
    run = runs.newest_name(files)
    assert run is not None
    known = architecture.recall(files, run, 8)
    assert known.from_step == 0
    assert known.model["class_name"] == "Sequential"
    assert json.loads((trained[0] / run / "MODEL.json").read_text()).keys() == {
        "from_step", "model", "sha256",
    }  # fmt: skip
    assert export_file.FORMATS == ("keras", "weights.h5", "safetensors")
