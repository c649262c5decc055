"""The state of other callbacks is restored: an interrupted run continues as if uninterrupted."""

from __future__ import annotations

import collections
import json
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
from keras_distplug.checkpoint import saver  # noqa: E402
from keras_distplug.core.errors import ConfigurationError  # noqa: E402
from keras_distplug.storage.files import open_files  # noqa: E402
from keras_distplug.storage.store import CheckpointStore  # noqa: E402

EPOCHS = 8
# Made-up losses that fall, rise and fall: what happens depends on earlier values.
MONITORED = [5.0, 4.0, 4.5, 4.6, 4.7, 3.0, 3.5, 3.6]


class MadeUp(keras.callbacks.Callback):
    """Logs the values that the other callbacks monitor."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["made_up"] = MONITORED[epoch]


class Own(keras.callbacks.Callback):
    """A custom callback with state to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.mean = np.zeros(3)
        self.worst = -np.inf

    def on_train_begin(self, logs: Any = None) -> None:
        self.seen, self.mean, self.worst = [], np.zeros(3), -np.inf

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(logs["loss"])
        self.mean += logs["loss"]
        self.worst = max(self.worst, logs["loss"])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "means": {"mean": self.mean}, "worst": np.float32(self.worst)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.mean = state["seen"], state["means"]["mean"]
        self.worst = state["worst"]


def early_stopping(**more: Any) -> keras.callbacks.Callback:
    return keras.callbacks.EarlyStopping("made_up", mode="min", **{"patience": 3, **more})


def reduce_lr() -> keras.callbacks.Callback:
    return keras.callbacks.ReduceLROnPlateau(
        "made_up", mode="min", factor=0.5, patience=2, cooldown=1
    )


MADE: dict[str, Callable[[Path], keras.callbacks.Callback]] = {
    "early": lambda folder: early_stopping(),
    "early_best": lambda folder: early_stopping(restore_best_weights=True),
    "early_delta": lambda folder: early_stopping(min_delta=0.2, patience=2),
    "reduce": lambda folder: reduce_lr(),
    "checkpoint": lambda folder: keras.callbacks.ModelCheckpoint(
        folder / "best.weights.h5",
        monitor="made_up",
        mode="min",
        save_best_only=True,
        save_weights_only=True,
    ),
    "checkpoint_by_batches": lambda folder: keras.callbacks.ModelCheckpoint(
        folder / "{epoch}-{batch}.weights.h5", save_freq=3, save_weights_only=True
    ),
    "csv": lambda folder: keras.callbacks.CSVLogger(folder / "log.csv"),
    "csv_append": lambda folder: keras.callbacks.CSVLogger(folder / "appended.csv", append=True),
    "schedule": lambda folder: keras.callbacks.LearningRateScheduler(
        lambda epoch, rate: rate * 0.9
    ),
    "own": lambda folder: Own(),
}


def fit(
    folder: Path, *made: str, epochs: int = EPOCHS, stop: small.Stop | None = None, **arguments: Any
) -> tuple[list[Any], dict[str, keras.callbacks.Callback]]:
    """Returns everything that a user sees of a training: weights, History, callbacks, files."""
    files = folder / "files"
    files.mkdir(parents=True, exist_ok=True)
    callbacks = {name: MADE[name](files) for name in made}
    model = small.model()
    history = model.fit(
        small.X, small.Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0,
        callbacks=[
            kd.BackupAndRestore(
                folder / "runs", delete_checkpoint=False, on_busy="wait", **arguments
            ),
            MadeUp(), *callbacks.values(), *([stop] if stop else []),
        ],
    )  # fmt: skip
    seen = [small.state(model), history.history, history.epoch]
    for callback in callbacks.values():
        known = vars(callback).items()
        seen.append({k: _plain(v) for k, v in known if k in ("wait", "best", "best_epoch", "seen")})
        seen.append([_plain(value) for value in getattr(callback, "best_weights", None) or []])
    for path in sorted(files.iterdir()):
        seen.append(_weights(path) if path.suffix == ".h5" else path.read_text())
        seen.append(path.name)
    return seen, callbacks


def _plain(value: Any) -> Any:
    return np.asarray(value).tolist()


def _weights(path: Path) -> list[bytes]:
    model = small.model()
    model.load_weights(path)
    return [variable.numpy().tobytes() for variable in model.variables]


@pytest.mark.parametrize(
    ("made", "epochs"),
    [
        ([name for name in MADE if not name.startswith("early")], [3, 5, 6]),
        (["early"], [3]),
        (["early_best", "reduce"], [3, 4]),
        (["early_delta", "own"], [2, 3]),
    ],
    ids=lambda value: "-".join(map(str, value)),
)
def test_interrupted(made: list[str], epochs: list[int], tmp_path: Path) -> None:
    """A run that was interrupted in some epochs ends like an uninterrupted one: with the same
    weights, History, callback states, and files."""
    expected, _ = fit(tmp_path / "a", *made)
    for epoch in epochs:
        with pytest.raises(small.Interrupted):
            fit(tmp_path / "b", *made, stop=small.Stop(epoch, 1))
        saver.wait_for_all()
    found, _ = fit(tmp_path / "b", *made)
    assert found == expected


def test_state_that_is_not_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above notices if the callbacks' state is not restored."""
    expected, _ = fit(tmp_path / "a", "early", "reduce", "own")
    with pytest.raises(small.Interrupted):
        fit(tmp_path / "b", "early", "reduce", "own", stop=small.Stop(3, 1))
    saver.wait_for_all()
    stock = "keras_distplug.checkpoint.callback_states.CallbackStates.restore"
    monkeypatch.setattr(stock, lambda *_, **__: [])
    found, _ = fit(tmp_path / "b", "early", "reduce", "own")
    differing = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
    assert {0, 1, 2} <= set(differing)


def test_several_callbacks_of_a_class(tmp_path: Path) -> None:
    """Callbacks of one class are distinguished by their order; an additional one starts fresh."""
    with pytest.raises(small.Interrupted):
        fit(tmp_path, "early", "early_delta", stop=small.Stop(3, 1))
    saver.wait_for_all()
    _, callbacks = fit(tmp_path, "early", "early_delta", "early_best", epochs=4)
    assert [each.best for each in callbacks.values()] == [4.0, 4.0, 4.6]
    assert [each.wait for each in callbacks.values()] == [2, 2, 0]


def test_finished(tmp_path: Path) -> None:
    """A finished run restores the state of its callbacks, and leaves their files alone."""
    expected, _ = fit(tmp_path, "early_best", "csv", "own")
    found, callbacks = fit(tmp_path, "early_best", "csv", "own")
    assert found == expected
    assert callbacks["early_best"].stopped_epoch == 4


def test_more_epochs_after_an_early_end(tmp_path: Path) -> None:
    """More epochs than those at which patience ended are trained: patience is reset, and the best
    result is kept."""
    fit(tmp_path, "early", epochs=6)
    _, callbacks = fit(tmp_path, "early", epochs=7)
    assert callbacks["early"].best == 3.0
    assert callbacks["early"].wait == 1
    assert callbacks["early"].stopped_epoch == 0


def test_moving_averages(tmp_path: Path) -> None:
    """Averaged weights that are in the model between epochs are still treated as averages."""

    def fit(folder: str, *stop: small.Stop) -> list[bytes]:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7), "mse")
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        backup = kd.BackupAndRestore(tmp_path / folder, delete_checkpoint=False)
        model.fit(
            small.X, small.Y, batch_size=8, epochs=4, shuffle=False, verbose=0,
            callbacks=[swap, backup, *stop],
        )  # fmt: skip
        return small.state(model)

    expected = fit("a")
    with pytest.raises(small.Interrupted):
        fit("b", small.Stop(2, 1))
    saver.wait_for_all()
    assert fit("b") == expected


def test_rows_of_other_epochs(tmp_path: Path) -> None:
    """Rows of other epochs than those trained again are kept."""
    with pytest.raises(small.Interrupted):
        fit(tmp_path, "csv", stop=small.Stop(2, 1))
    saver.wait_for_all()
    log = tmp_path / "files" / "log.csv"
    log.write_text(log.read_text() + "a note\n")
    with pytest.warns(UserWarning, match=r"CSVLogger file .*log.csv to continue with epoch"):
        fit(tmp_path, "csv", epochs=3)
    rows = [line.split(",")[0] for line in log.read_text().splitlines()]
    assert rows == ["epoch", "0", "1", "a note", "2"]


def test_new_run(tmp_path: Path) -> None:
    """A new run starts the file of a CSVLogger as Keras does."""
    fit(tmp_path, "csv", epochs=3)
    fit(tmp_path, "csv", epochs=2, resume=False)
    rows = [row.split(",")[0] for row in (tmp_path / "files" / "log.csv").read_text().splitlines()]
    assert rows == ["epoch", "0", "1"]


def test_open_format(tmp_path: Path) -> None:
    """Callback states are strict JSON in the manifest, and arrays next to the model's."""
    fit(tmp_path, "early_best", "own", epochs=2)
    stored = CheckpointStore(open_files(tmp_path / "runs"), "run-0001").newest("step")
    assert stored is not None
    states = {each["callback"]: each["state"] for each in stored.manifest.callbacks}
    assert states["EarlyStopping"]["keras"]["best"] == 4.0
    assert json.dumps(states["Own"], allow_nan=False)
    assert stored.arrays["callbacks/Own/means/mean"].shape == (3,)
    assert "callbacks/EarlyStopping/best_weights/0" in stored.arrays


class Held(keras.callbacks.Callback):
    """Returns a state that can be saved at first."""

    def __init__(self, *states: Any) -> None:
        super().__init__()
        self.states, self.loaded = list(states), None

    def state_dict(self) -> dict[str, Any]:
        return {"a": self.states[0], "b": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.states = self.states[1:] or self.states


def held(folder: Path, callback: Held, epochs: int) -> Any:
    backup = kd.BackupAndRestore(folder, delete_checkpoint=False, on_busy="wait")
    small.model().fit(small.X, small.Y, epochs=epochs, verbose=0, callbacks=[backup, callback])
    return callback.loaded


def test_state_of_any_kind(tmp_path: Path) -> None:
    """A state is restored with its types: keys that are not text, sets, tuples, NumPy's numbers."""
    state = {
        3: (1.5, None, np.float32(0.1)),
        (1, "a"): {2.0, 1.0},
        "__array__": collections.deque([1, float("inf")], 4),
        "rows": list(range(100)),
        "rates": [0.1] * 100,
        "array": np.arange(6, dtype="int8").reshape(2, 3),
        "bytes": b"\x00a",
        "path": Path("a/b"),
        "count": collections.Counter("aab"),
        "bfloat16": tf.constant([1.5], tf.bfloat16),
    }
    held(tmp_path, Held(state), 1)
    loaded = held(tmp_path, Held(0), 2)
    for name in ("array", "bfloat16"):
        one, other = (np.asarray(each.pop(name)) for each in (loaded["a"], state))
        assert (one.dtype, one.tolist()) == (other.dtype, other.tolist())
    assert loaded == {"a": state, "b": 1}
    assert type(loaded["a"][3][2]) is np.float32
    assert type(loaded["a"]["count"]) is collections.Counter
    assert loaded["a"]["__array__"].maxlen == 4


def test_state_that_becomes_unusable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A state that can be saved at first, but not later, is reported once, and training
    continues."""
    assert held(tmp_path, Held({}, {1: 0.5}, object(), object()), 4) is None
    [line] = {each for each in caplog.messages if "could not be saved" in each}
    assert line.startswith("Held.state_dict()[a] could not be saved")
    assert held(tmp_path, Held({}), 5) is None  # the last checkpoint has no state


@pytest.mark.parametrize("value", [object(), np.array(["a"]), {1: {object()}}])
def test_bad_state(value: Any, tmp_path: Path) -> None:
    """A state that JSON and arrays cannot hold is an error before training, which names the
    leaf."""

    class Bad(Own):
        def state_dict(self) -> dict[str, Any]:
            return {"a": [0, {"b": value}]}

    stop = small.Stop()
    with pytest.raises(ConfigurationError, match=r"Bad.state_dict\(\).* at `a/1/b"):
        small.model().fit(
            small.X, small.Y, verbose=0, callbacks=[kd.BackupAndRestore(tmp_path), Bad(), stop]
        )
    assert stop.batches == 0
