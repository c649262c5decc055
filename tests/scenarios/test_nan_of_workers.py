"""NaN in the data of one of several workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cluster import run_workers

from keras_distplug.nonfinite import incident_files
from keras_distplug.storage.files import open_files

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.cluster

SCRIPT = Path(__file__).parents[1] / "workers" / "nan.py"
WORKERS = 2


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def found(shared: Path) -> list[dict[str, Any]]:
    """Returns the findings of all workers."""
    ended = run_workers([str(SCRIPT), str(shared)], WORKERS, timeout_s=240)
    outputs = "\n".join(each.output for each in ended)
    assert [each.returncode for each in ended] == [0] * WORKERS, outputs
    lines = [line for each in ended for line in each.output.splitlines() if "FOUND " in line]
    return [json.loads(line.partition("FOUND ")[2]) for line in lines]


def test_same_findings(found: list[dict[str, Any]]) -> None:
    assert len(found) == WORKERS
    assert found[0] == found[1]


def test_without_faults(found: list[dict[str, Any]]) -> None:
    """Training without faults is bit-identical with and without the watchdog."""
    bare, watched = found[0]["bare"], found[0]["watched"]
    assert watched["reported"] == []
    assert (watched["bits"], watched["history"]) == (bare["bits"], bare["history"])


def test_skipped_update(found: list[dict[str, Any]]) -> None:
    """NaN in a worker's samples is attributed to it, and the batch is skipped."""
    skip, absent = found[0]["skip"], found[0]["absent"]
    assert skip["culprits"] == [[WORKERS - 1]]
    assert "batch 4: replica 1 (worker-1 on " in skip["reported"][0]
    assert (skip["bits"], skip["history"]) == (absent["bits"], absent["history"])


def test_replayed_batch(found: list[dict[str, Any]], shared: Path) -> None:
    """The worker that had the batch computes it again, alone, and saves its part."""
    reported = found[0]["skip"]["reported"][0]
    origin = "the batch (1 of 36 values in `x` are not finite, first in sample 6 of 6)"
    assert reported.endswith(f"; NaN or Inf first appears in {origin}")
    files = open_files(shared / "skip")
    [name] = incident_files.names(files)
    incident, (x, _) = incident_files.read(files, name)
    assert (incident.epoch, incident.batch, incident.replica) == (0, 3, 1)
    assert (x.shape, np.isnan(x).sum()) == ((6, 6), 1)


def test_rollback(found: list[dict[str, Any]]) -> None:
    """After too many consecutive skips, training resumes from the checkpoint.

    It does not repeat the batches since then.
    """
    back, absent = found[0]["back"], found[0]["absent since"]
    assert [each.partition(":")[0] for each in back["reported"]] == [
        f"epoch 1, batch {batch}" for batch in (6, 7)
    ]
    assert (back["bits"], back["history"]) == (absent["bits"], absent["history"])


def test_rollback_does_not_help(found: list[dict[str, Any]]) -> None:
    """If a rollback does not help, all workers end training."""
    ended = found[0]["no more"]
    assert ended["error"].startswith(
        "2 consecutive updates skipped (non-finite values or outliers), and there is no che"
    )
    assert len(ended["reported"]) == 2
