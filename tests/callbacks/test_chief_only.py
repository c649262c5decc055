"""Files of callbacks on the chief and on other workers, simulated in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from support import small

import keras_distplug as kd
from keras_distplug.callbacks.chief_only import ChiefOnlyPlaceholder
from keras_distplug.checkpoint.callback_states import CallbackStates

pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]


def tf_config(index: int) -> str:
    cluster = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})


def writers(folder: Path) -> list[keras.callbacks.Callback]:
    return [
        keras.callbacks.ModelCheckpoint(folder / "{epoch:02d}-{loss:.2f}.keras"),
        keras.callbacks.ModelCheckpoint(folder / "best.weights.h5", save_weights_only=True),
        keras.callbacks.CSVLogger(folder / "log.csv"),
        keras.callbacks.TensorBoard(folder / "logs", histogram_freq=1),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: (folder / "mine").touch()),
    ]


def fit(callbacks: list[keras.callbacks.Callback]) -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((6, 2))
    model.fit(x, x[:, :1], epochs=3, verbose=0, callbacks=callbacks)
    return model


@pytest.mark.parametrize("role", [None, "0"])
def test_chief(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str | None) -> None:
    """On the chief, and in a single process, callbacks are unchanged."""
    if role is not None:
        monkeypatch.setenv("TF_CONFIG", tf_config(int(role)))
    given = writers(tmp_path)
    assert [kd.chief_only(each) for each in given] == given
    fit(given)
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"best.weights.h5", "log.csv", "logs", "mine"}
    assert len(list(tmp_path.glob("*.keras"))) == 3


def test_another_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another worker, Keras' file-writing callbacks write to a scratch folder, one file for all
    epochs; other callbacks do nothing. A second call changes nothing."""
    monkeypatch.setenv("TF_CONFIG", tf_config(1))
    given = writers(tmp_path)
    found = [kd.chief_only(each) for each in given]
    assert found[:4] == given[:4]
    assert isinstance(found[4], ChiefOnlyPlaceholder)
    assert found[4].stands_for is given[4]
    places = [found[0].filepath, found[1].filepath, found[2].filename, found[3].log_dir]
    assert [kd.chief_only(each) for each in found[:4]] == given[:4]
    assert [found[0].filepath, found[1].filepath, found[2].filename, found[3].log_dir] == places
    monkeypatch.delenv("TF_CONFIG")
    model = fit(found)
    assert list(tmp_path.iterdir()) == []
    assert [Path(place).name for place in places] == [
        "-.keras",
        "best.weights.h5",
        "log.csv",
        "logs",
    ]
    loaded = keras.models.load_model(places[0])
    for mine, its in zip(model.get_weights(), loaded.get_weights(), strict=True):
        assert mine.tobytes() == its.tobytes()
    assert len(Path(places[2]).read_text().splitlines()) == 4
    assert list(Path(places[3]).rglob("*tfevents*"))


class Counts(keras.callbacks.Callback):
    """Has state."""

    def __init__(self, known: int) -> None:
        super().__init__()
        self.known = known

    def state_dict(self):
        return {"known": self.known}

    def load_state_dict(self, state):
        self.known = state["known"]


def test_state_of_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of the chief's callbacks is restored to the same ones on other workers, even if one
    is replaced there."""
    model = small.model()
    states, arrays = CallbackStates([Counts(1), Counts(2)], model).capture()
    monkeypatch.setenv("TF_CONFIG", tf_config(1))
    left, mine = kd.chief_only(Counts(3)), Counts(4)
    CallbackStates([left, mine], model).restore(states, arrays, epoch=1, is_anew=False)
    assert mine.known == 2


@pytest.mark.parametrize("end", ["", "raise KeyError", "sys.exit(3)"])
def test_scratch(tmp_path: Path, end: str) -> None:
    """The scratch folder is deleted when the process exits, for whatever reason."""
    script = (
        "import sys, keras, keras_distplug as kd\n"
        "logger = kd.chief_only(keras.callbacks.CSVLogger('log.csv'))\n"
        "open(logger.filename, 'w').close()\n"
        f"print(logger.filename)\n{end}"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**_environ(), "TF_CONFIG": tf_config(1), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.strip().startswith(str(tmp_path)), done.stderr
    assert list(tmp_path.glob("keras-distplug-*")) == []


@pytest.mark.parametrize(
    "callback",
    [
        keras.callbacks.EarlyStopping(),
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.ReduceLROnPlateau(),
        kd.HangWatchdog(),
        keras.callbacks.EarlyStopping,
    ],
)
def test_refused(callback: object) -> None:
    """A callback that influences training is refused, also on the chief."""
    with pytest.raises(
        kd.errors.ConfigurationError, match=r"must run on all|Expected (a Keras )?callback"
    ):
        kd.chief_only(callback)


def _environ() -> dict[str, str]:

    return {k: v for k, v in os.environ.items() if not k.startswith("KERAS_DISTPLUG_")}
