"""What upstream gets wrong. When one of these fails, upstream is mended: drop the override."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cluster import run_workers

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

SCRIPT = Path(__file__).parents[1] / "workers" / "upstream.py"


def findings(case: str, workers: int) -> dict[str, Any]:
    ended = run_workers(
        [str(SCRIPT), case], workers, env={"KERAS_DISTPLUG_AUTO_INIT": "0"}, timeout_s=90
    )
    for one in ended:
        assert one.returncode == 0, one.output
    found: dict[str, Any] = {}
    for line in ended[0].output.splitlines():
        if line.startswith("FOUND "):
            found |= json.loads(line.removeprefix("FOUND "))
    return found


@pytest.fixture(scope="module")
def multi_worker() -> dict[str, Any]:
    return findings("multi_worker", workers=2)


@pytest.fixture(scope="module")
def mirrored() -> dict[str, Any]:
    return findings("mirrored", workers=1)


def test_fit(multi_worker: dict[str, Any]) -> None:
    """keras-team/keras#20585: `_maybe_symbolic_build` fails under MultiWorkerMirroredStrategy."""
    assert multi_worker["fit"][0] == "ValueError"
    assert "_maybe_symbolic_build" in multi_worker["fit"]


def test_logs(multi_worker: dict[str, Any]) -> None:
    """The same issue, behind it: `reduce_per_replica` fails on a step's scalar logs."""
    assert "reduce_per_replica" in multi_worker["logs"]


def test_statistics(multi_worker: dict[str, Any]) -> None:
    """BatchNormalization's moving statistics are not brought together over replicas."""
    assert multi_worker["statistics"] == "NONE"


def test_predict_from_files(multi_worker: dict[str, Any]) -> None:
    """`predict` of a dataset read from files is out of order, or repeats one worker's share."""
    assert multi_worker["predict"] != [2.0 * number for number in range(8)]


def test_late_strategy() -> None:
    """tensorflow/tensorflow#35297: the strategy cannot be made once a tensor exists."""
    assert findings("late", workers=2)["late"][0] == "RuntimeError"


def test_uneven_batch(mirrored: dict[str, Any]) -> None:
    """Replicas count the same in the loss, however many samples each has."""
    assert np.allclose(*mirrored["even"], rtol=1e-5)
    assert not np.allclose(*mirrored["uneven"], rtol=1e-3)


def test_clipping(mirrored: dict[str, Any]) -> None:
    """Gradients are clipped on each replica before they are summed."""
    assert not np.allclose(*mirrored["clipped"], rtol=1e-3)
