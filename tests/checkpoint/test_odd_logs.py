"""Logs other than single numbers: of Keras' own metrics, and of custom callbacks."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from support import small  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.checkpoint import lost_logs, saver  # noqa: E402
from keras_distplug.storage.manifest import Manifest  # noqa: E402

Y = np.eye(3, dtype="float32")[np.arange(30) % 3]
EPOCHS = 3

VALUES: dict[str, Callable[[int], Any]] = {
    "text": lambda epoch: f"09:3{epoch}",
    "nothing": lambda epoch: None,
    "array": lambda epoch: np.eye(2, dtype="float32") * epoch,
    "tensor": lambda epoch: tf.constant([epoch, 2]),
    "bfloat16": lambda epoch: np.array([epoch, 0.5], ml_dtypes.bfloat16),
    "dict": lambda epoch: {"a": np.float32(epoch), "b": [epoch, {"c": np.arange(2)}]},
    "number": lambda epoch: np.int64(epoch),
    "not finite": lambda epoch: [float("nan"), np.float32("inf")],
}


class Add(keras.callbacks.Callback):
    """Adds a value to the logs of every epoch."""

    def __init__(self, value: Callable[[int], Any] | None) -> None:
        super().__init__()
        self.value = value

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.value is not None:
            logs["extra"] = self.value(epoch)


@pytest.fixture(autouse=True)
def wait_for_every_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for every save, so that the step from which an interrupted `fit` resumes is known."""
    stock = saver.Saver.start

    def start(self: saver.Saver, step: int, save: Callable[[], None]) -> None:
        stock(self, step, save)
        self.wait()

    monkeypatch.setattr(saver.Saver, "start", start)


def fit(value: Callable[[int], Any] | None, *callbacks: keras.callbacks.Callback) -> Any:
    keras.utils.set_random_seed(1)
    layers = [keras.Input((4,)), keras.layers.Dense(3, activation="softmax")]
    model = keras.Sequential(layers)
    model.compile("adam", "categorical_crossentropy", metrics=[keras.metrics.F1Score()])
    added = [Add(value), *callbacks]
    model.fit(small.X, Y, batch_size=8, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=added)
    return model.history.history


def backup(folder: Path) -> keras.callbacks.Callback:
    return kd.BackupAndRestore(folder, save_freq=1, on_busy="wait", delete_checkpoint=False)


def require_same(found: Any, expected: Any) -> None:
    """Checks for the same values, and arrays of the same type."""
    found, expected = keras.tree.map_structure(as_array, (found, expected))
    np.testing.assert_equal(found, expected)
    types = keras.tree.map_structure(lambda each: getattr(each, "dtype", None), (found, expected))
    assert types[0] == types[1]


def as_array(value: Any) -> Any:
    """A tensor is restored as an array, and a NumPy number as a Python number."""
    if value is None or isinstance(value, str):
        return value
    array = np.asarray(value)
    return array if array.ndim else array.item()


class StopAtEnd(keras.callbacks.Callback):
    """Interrupts training after the last batch of the second epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            raise small.Interrupted


@pytest.mark.parametrize("stop", [small.Stop(1, 1), StopAtEnd()], ids=["in it", "at its end"])
@pytest.mark.parametrize("name", ["backup", "defaults"])
def test_score_per_class(name: str, stop: keras.callbacks.Callback, tmp_path: Path) -> None:
    """`F1Score()` logs an array. Its checkpoints can be read, and History holds it after a restart,
    even for an epoch that has no batch left, and with additional callbacks."""
    expected = fit(None)
    with pytest.raises(small.Interrupted):
        fit(None, backup(tmp_path), stop)
    callbacks = [backup(tmp_path)] if name == "backup" else kd.defaults(tmp_path, save_freq="epoch")
    require_same(fit(None, *callbacks), expected)
    require_same(fit(None, backup(tmp_path)), expected)


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str, tmp_path: Path) -> None:
    """Values that a callback adds to the logs are restored: those of epochs before a restart are in
    History with the others."""
    expected = fit(VALUES[name])
    with pytest.raises(small.Interrupted):
        fit(VALUES[name], backup(tmp_path), small.Stop(2, 0))
    require_same(fit(VALUES[name], *kd.defaults(tmp_path, save_freq="epoch")), expected)


def test_unsavable_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that cannot be saved costs neither training nor a checkpoint, and is reported once,
    with its name and type."""

    def now(epoch: int) -> datetime.date:
        return datetime.date(2026, 1, 1 + epoch)

    announced: list[str] = []
    monkeypatch.setattr(lost_logs, "announce", announced.append)
    with pytest.raises(small.Interrupted):
        fit(now, backup(tmp_path), small.Stop(2, 1))
    assert (
        "\n".join(announced).count(
            "the entry 'extra' of `logs` has a value of type date, which cannot"
        )
        == 1
    )
    assert fit(now, backup(tmp_path))["extra"] == [None, None, now(2)]


def test_manifest_that_its_reader_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that could not be read again is never committed, and is reported immediately."""
    stock, refused = Manifest.from_json, []

    def from_json(text: str, source: str) -> Manifest:
        if '"step":4' in text.replace(" ", "") and not refused:
            refused.append(source)
            raise kd.errors.CorruptCheckpointError("no manifest")
        return stock(text, source)

    monkeypatch.setattr(Manifest, "from_json", from_json)
    with pytest.warns(UserWarning, match="could not be read back: no manifest"):
        fit(None, backup(tmp_path))
    assert len(refused) == 1
    assert not (tmp_path / "run-0001" / "step-00000004" / "MANIFEST.json").exists()
    assert (tmp_path / "run-0001" / f"final-{small.BATCHES * EPOCHS:08d}").exists()
