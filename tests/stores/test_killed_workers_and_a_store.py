"""Workers with checkpoints in S3, one of which is killed: the result is that of undisturbed
ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from stores.conftest import Started
from support import fault
from support.cluster import run_job
from support.fault import Fault

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.cluster, pytest.mark.stores, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[1] / "workers" / "faulty.py"


def train(stores: Started, folder: Path, *faults: Fault) -> list[dict[str, bytes]]:
    """Returns the results of both workers; every fault occurred exactly once."""
    folder.mkdir()
    fault.write(folder, faults)
    place = stores["moto"]
    ended = run_job(
        [str(SCRIPT), str(folder), "distributed_fit"],
        2,
        env={"KERAS_DISTPLUG_TEST_STORE": json.dumps([place.url, place.options])},
        timeout_s=400,
    )
    assert ended.returncode == 0, ended.output
    assert [each.index for each in fault.fired(folder)] == list(range(len(faults)))
    assert not faults or f"{place.url}/run-0001, checkpoint step-" in ended.output
    assert place.options["secret"] not in ended.output
    assert not (folder / "runs").exists()
    outcomes = [np.load(folder / f"outcome-{worker}.npz") for worker in range(2)]
    return [{name: outcome[name].tobytes() for name in outcome.files} for outcome in outcomes]


def test_killed(stores: Started, tmp_path: Path) -> None:
    """Every worker writes its share to the store and reads everything from it."""
    expected = train(stores, tmp_path / "undisturbed")
    assert train(stores, tmp_path / "killed", fault.kill(1, at_step=7)) == expected
    assert expected[0] == expected[1]
