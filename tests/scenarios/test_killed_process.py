"""A single real process, killed and restarted by hand."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
from support import fault
from support.cluster import run_workers
from support.fault import Fault
from support.harmed import differences

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).parents[1] / "workers" / "faulty.py"


def run(folder: Path, way: str, *faults: Fault) -> int:
    folder.mkdir(exist_ok=True)
    fault.write(folder, faults)
    [ended] = run_workers([str(SCRIPT), str(folder), way], 1, timeout_s=180)
    assert ended.returncode in (0, -signal.SIGKILL), ended.output
    return ended.returncode


@pytest.mark.parametrize("way", ["distributed_fit", "plain_fit"])
def test_killed_twice(way: str, tmp_path: Path) -> None:
    """A script that was killed and restarted twice is bit-identical to an uninterrupted one."""
    assert run(tmp_path / "a", way) == 0
    faults = (fault.kill(at_step=3), fault.kill(at_step=11))
    codes = [run(tmp_path / "b", way, *faults) for _ in range(3)]
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert [each.index for each in fault.fired(tmp_path / "b")] == [0, 1]
    expected, found = (dict(np.load(tmp_path / run / "outcome-0.npz")) for run in "ab")
    assert differences(found, expected) == []
