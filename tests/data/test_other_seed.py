"""Scripts that seed themselves with the time: a restart has other seeds, but is the same run."""

from __future__ import annotations

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
from keras_distplug.checkpoint import fit_state  # noqa: E402


def sliced() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((small.X, small.Y))


INPUTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "arrays": lambda seed: {"x": small.X, "y": small.Y, "batch_size": 8},
    "batches of arrays": lambda seed: {
        **{"x": small.X, "y": small.Y, "batch_size": 8},
        "shuffle": "batch",
    },
    "shuffle": lambda seed: {"x": sliced().shuffle(30).batch(8)},
    "shuffle with a seed": lambda seed: {
        "x": sliced().shuffle(9, seed=seed).batch(4).shuffle(3, seed=2 * seed).rebatch(8)
    },
    "same order in every epoch": lambda seed: {
        "x": sliced().shuffle(30, seed, reshuffle_each_iteration=False).batch(8)
    },
}


def fit(name: str, seed: int, *callbacks: keras.callbacks.Callback) -> tuple[list[bytes], object]:
    model = small.model(seed)
    given = INPUTS[name](seed)
    history = model.fit(**given, epochs=3, verbose=0, callbacks=callbacks)
    return small.state(model), history.history


@pytest.mark.parametrize("name", INPUTS)
def test_interrupted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is interrupted, and resumed with other seeds, ends like an uninterrupted one."""
    announced: list[str] = []
    monkeypatch.setattr(fit_state, "announce", announced.append)

    def backup(folder: str) -> keras.callbacks.Callback:
        path = tmp_path / folder
        return kd.BackupAndRestore(path, save_freq=1, on_busy="wait", delete_checkpoint=False)

    whole = fit(name, 5, backup("whole"))
    assert whole != fit(name, 6)
    with pytest.raises(small.Interrupted):
        fit(name, 5, backup("other"), small.Stop(0, 2))
    with pytest.raises(small.Interrupted):
        fit(name, 6, backup("other"), small.Stop(1, 2))
    assert sum("the checkpoint's are used" in each for each in announced) == 1
    assert fit(name, 7, backup("other")) == whole
