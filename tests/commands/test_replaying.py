"""`keras-distplug replay`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from commands.conftest import Ask  # noqa: E402
from support import small  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.nonfinite import incident_files  # noqa: E402
from keras_distplug.nonfinite.incident_files import Incident  # noqa: E402
from keras_distplug.storage.files import open_files  # noqa: E402

Say = Callable[..., tuple[int, str]]
BAD = (1, 2)  # epoch and batch


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training with checkpoints at steps 2, 4 and so on to 12, and a NaN in step 7."""
    made = tmp_path_factory.mktemp("runs")
    x = np.tile(small.X[:8], (12, 1))
    x[6 * 8 + 5, 1] = np.nan
    data = tf.data.Dataset.from_tensor_slices((x, np.tile(small.Y[:8], (12, 1)))).batch(8)
    backup = kd.BackupAndRestore(
        made, save_freq=2, on_busy="wait", keep_last=9, delete_checkpoint=False
    )
    small.model().fit(
        data, epochs=3, steps_per_epoch=4, verbose=0, callbacks=[backup, kd.NaNWatchdog()]
    )
    return made


def another(directory: Path, data: Any, **changes: Any) -> str:
    incident = Incident(
        **{
            "run": "run-0001",
            "epoch": 1,
            "batch": 0,
            "replica": 0,
            "told": "told",
            "created_utc": "2020-01-01T00:00:00+00:00",
            **changes,
        }
    )
    open_files(directory).create(incident.path, incident_files.encode(incident, data))
    return incident.name


def test_not_finite(directory: Path, ask: Ask, say: Say) -> None:
    """With the values from before the incident, its first cause is reported."""
    code, told = ask("replay", directory)
    assert code == 1
    assert (told["run"], told["checkpoint"]) == ("run-0001", "step-00000006")
    assert (told["incident"]["epoch"], told["incident"]["batch"]) == BAD
    origin = "the batch (1 of 32 values in `x` are not finite, first in sample 6 of 8)"
    assert (told["is_finite"], told["loss"], told["origin"]) == (False, "nan", origin)
    assert len(told["variables"]) == 4
    code, text = say("replay", directory)
    assert code == 1
    assert f"run-0001/step-00000006: NaN or Inf first appears in {origin} (loss nan)" in text
    assert "as reported during training: replica 0 (worker-0 on " in text


def test_finite(directory: Path, ask: Ask) -> None:
    """A batch without non-finite values, selected by name."""
    name = another(directory, (small.X[:8], small.Y[:8]))
    code, told = ask("replay", directory, name)
    assert (code, told["is_finite"], told["origin"]) == (0, True, None)
    assert told["checkpoint"] == "step-00000004"
    assert float(told["loss"]) > 0
    assert json.dumps(told, allow_nan=False)


@pytest.mark.parametrize(
    ("changes", "arguments", "checkpoint"),
    [
        ({"epoch": 0, "batch": 0, "replica": 1}, (), "step-00000002"),
        ({"epoch": 9, "replica": 2}, (), "final-00000012"),
        ({"epoch": 9, "replica": 3}, ("--step", "8"), "step-00000008"),
    ],
)
def test_checkpoint(
    changes: Any, arguments: Any, checkpoint: str, directory: Path, ask: Ask
) -> None:
    """The newest checkpoint from before, else the oldest, or the selected one."""
    name = another(directory, (small.X[:8], small.Y[:8]), **changes)
    code, told = ask("replay", directory, name, *arguments)
    assert (code, told["checkpoint"]) == (0, checkpoint)


def test_no_incidents(tmp_path: Path, directory: Path, say: Say) -> None:
    code, text = say("replay", tmp_path)
    assert code == 3
    assert "contains no saved batch" in text
    code, text = say("replay", directory, "it")
    assert code == 3
    assert "no saved batch 'it'" in text
    another(tmp_path, (small.X, small.Y))
    code, text = say("replay", tmp_path)
    assert code == 3
    assert "contains no runs" in text
