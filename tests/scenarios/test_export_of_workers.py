"""Exported files, written in the middle of a training with several workers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.cluster import run_workers

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.cluster, pytest.mark.tf, pytest.mark.timeout(600)]

import keras  # noqa: E402
import safetensors.numpy  # noqa: E402

SCRIPT = Path(__file__).parents[1] / "workers" / "saving.py"


def test_export_of_two_workers(tmp_path: Path) -> None:
    """All workers call `export`, and the chief writes the files, which hold the current model.

    The training is bit-identical to one without exports.
    """
    outcomes = {}
    for name, how in (("plain", ()), ("export", ("export",))):
        (tmp_path / name / "exported").mkdir(parents=True)
        ended = run_workers([str(SCRIPT), str(tmp_path / name), *how], 2, timeout_s=240)
        for each in ended:
            assert each.returncode == 0, each.output
        outcomes[name] = {
            key: array.tobytes()
            for worker in range(2)
            for key, array in np.load(tmp_path / name / f"outcome-worker-{worker}.npz").items()
        }
    assert ended[0].output.count(": exported to ") == 3
    assert ": exported to " not in ended[1].output
    assert outcomes["export"] == outcomes["plain"]

    then = [a.tobytes() for a in np.load(tmp_path / "export" / "then.npz").values()]
    folder = tmp_path / "export" / "exported"
    loaded = keras.models.load_model(folder / "model.keras")
    variables = [*loaded.weights, *loaded.optimizer.variables]
    assert [np.asarray(v).tobytes() for v in variables] == then
    loaded.load_weights(folder / "model.weights.h5")
    assert [np.asarray(v).tobytes() for v in loaded.weights] == then[: len(loaded.weights)]
    arrays = safetensors.numpy.load_file(folder / "model.safetensors")
    assert {a.tobytes() for a in arrays.values()} == set(then[: len(loaded.weights)])
    names = {path.name for path in folder.iterdir()}
    assert names == {"model.keras", "model.weights.h5", "model.safetensors"}
