"""A training that saves in every epoch, killed during writes, or on failing storage."""

from __future__ import annotations

import random
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from support import fault
from support.cluster import Ended, run_workers
from support.fault import Fault

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[1] / "workers" / "saving.py"
KILLS = 5


def run(folder: Path, workers: int, *faults: Fault) -> list[Ended]:
    """Faults that have already occurred are not repeated."""
    folder.mkdir(exist_ok=True)
    fault.write(folder, faults)
    return run_workers([str(SCRIPT), str(folder)], workers, timeout_s=240)


def fired_faults(folder: Path) -> list[tuple[int, str]]:
    """Returns the faults that occurred, with their workers."""
    return [(each.index, each.who) for each in fault.fired(folder)]


def outcome(folder: Path, worker: int = 0) -> dict[str, bytes]:
    return {
        name: a.tobytes() for name, a in np.load(folder / f"outcome-worker-{worker}.npz").items()
    }


def test_killed_during_writes(tmp_path: Path) -> None:
    """Killed five times before a write, sync, link or deletion, and restarted by hand.

    The result is bit-identical to an uninterrupted run, and nothing was ever damaged.
    """
    random_ = random.Random(4)
    [ended] = run(tmp_path / "a", 1)
    assert ended.returncode == 0, ended.output
    kills = [fault.kill_in_call(random_.randrange(5, 45)) for _ in range(KILLS)]
    for count in range(1, KILLS + 1):
        [ended] = run(tmp_path / "b", 1, *kills)
        assert ended.returncode == -signal.SIGKILL, ended.output
        assert fired_faults(tmp_path / "b") == [(index, "worker-0") for index in range(count)]
        assert "quarantined" not in ended.output
    [ended] = run(tmp_path / "b", 1, *kills)
    assert ended.returncode == 0, ended.output
    assert "quarantined" not in ended.output
    assert "resuming at epoch" in ended.output
    assert outcome(tmp_path / "b") == outcome(tmp_path / "a")


def test_one_worker_cannot_write(tmp_path: Path) -> None:
    """Two saves that one of two workers could not write are not checkpoints.

    Training continues on both workers with bit-identical results.
    """
    for ended in run(tmp_path / "a", 2):
        assert ended.returncode == 0, ended.output
    full = fault.fails_to_write(1, at_step=8, saves=2)
    chief, other = run(tmp_path / "b", 2, full)
    assert (chief.returncode, other.returncode) == (0, 0), chief.output + other.output
    assert fired_faults(tmp_path / "b") == [(0, "worker-1")]
    failed = (
        r"Saving a checkpoint failed or takes too long \(consecutive failures: (\d).* "
        r"The checkpoint of step (\d+) could not"
    )
    assert re.findall(failed, chief.output) == [("1", "9"), ("2", "12")]
    assert "No space left on device" in chief.output
    for worker in range(2):
        assert outcome(tmp_path / "b", worker) == outcome(tmp_path / "a", 0)


def test_one_worker_can_never_write(tmp_path: Path) -> None:
    """After three failed saves on one of two workers, both end with the error.

    On working storage, they resume from the last commit.
    """
    full = fault.fails_to_write(1, at_step=8, saves=99)
    ended = run(tmp_path, 2, full)
    for each in ended:
        assert each.returncode == 7, each.output
        assert "checkpoints could not be written (consecutive failures: 3)" in each.output
        assert "No space left on device" in each.output
    assert fired_faults(tmp_path) == [(0, "worker-1")]
    ended = run(tmp_path, 2, full)
    for each in ended:
        assert each.returncode == 0, each.output
    assert "resuming at epoch 3/12" in ended[0].output
    assert outcome(tmp_path, 0) == outcome(tmp_path, 1)
