"""Two real workers with different configurations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.cluster import run_workers

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[1] / "workers" / "disagree.py"

SAID = {
    "units": "layer 1 (Dense).units: 8 on worker-0, 9 on worker-1",
    "activation": "layer 1 (Dense).activation: relu on worker-0, tanh on worker-1",
    "rate": "layer 2 (Dropout).rate: 0.2 on worker-0, 0.3 on worker-1",
    "loss": "loss: binary_crossentropy on worker-0, mean_squared_error on worker-1",
    "optimizer": "optimizer: Adam on worker-0, SGD on worker-1",
    "beta": "optimizer.beta_1: 0.9 on worker-0, 0.8 on worker-1",
    "metrics": "metrics: [accuracy] on worker-0, [] on worker-1",
    "values": "; x: hash ",
    "order": "the order of the samples: hash ",
    "size": (": 64 on worker-0, 96 on", "batches: 4 on worker-0, 6 on"),
    "batch": "batch_size: 16 on worker-0, 8 on worker-1",
    "epochs": "epochs: 2 on worker-0, 3 on worker-1",
    "validation": "validation_data: given on worker-0, none on worker-1",
    "validation_freq": "validation_freq: 1 on worker-0, 2 on worker-1",
    "steps_per_epoch": "steps_per_epoch: none on worker-0, 2 on worker-1",
    "own batches": "batches per epoch: 4 on worker-0, 2 on worker-1",
    "own validation": "batches of validation_data: 4 on worker-0, 3 on worker-1",
    "class_weight": "class_weight: none on worker-0, {0: 1.0, 1: 2.0} on worker-1",
}
NOTED = {
    "seed": "the seed of `keras.utils.set_random_seed`: 1 on worker-0, 2 on worker-1, "
    "worker-0's is used",
    "learning_rate": "optimizer.learning_rate: 0.01 on worker-0, 0.05 on worker-1, "
    "worker-0's is used",
}


def test_disagreeing(tmp_path: Path) -> None:
    """Both workers refuse differences that would corrupt training, and report both values.

    They continue with the chief's seed and learning rate, and log that. Every worker may read its
    own part of the data.
    """
    for worker in run_workers([str(SCRIPT), str(tmp_path)], 2, timeout_s=240):
        assert worker.returncode == 0, worker.output
    chief, other = (json.loads((tmp_path / f"worker-{n}.json").read_text()) for n in range(2))
    assert {len(kinds) for kinds in chief.values()} == {len(SAID) + 3, len(SAID) + 1}
    for way, kinds in chief.items():
        for kind, reported in kinds.items():
            where = f"{way}: {kind}"
            assert reported["error"] == other[way][kind]["error"], where
            if kind in SAID:
                said = SAID[kind] if isinstance(SAID[kind], tuple) else (SAID[kind],)
                assert any(each in reported["error"] for each in said), reported["error"]
                assert "Nothing was trained" in reported["error"]
                continue
            assert reported["error"] is None, where
            assert reported["weights"] == other[way][kind]["weights"], where
            # A variable created in the scope already has the chief's value.
            noted = None if (way, kind) == ("fit", "learning_rate") else NOTED.get(kind)
            assert reported["noted"] == ([] if noted is None else [f"the workers differ ({noted})"])
