"""The remains of a hanging process. The fault matrix tests that hangs are detected and named."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import fault, harmed
from support.cluster import run_workers
from support.harmed import Job, SetUp

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def test_exit_code(tmp_path: Path) -> None:
    """Without a supervisor, the process exits with 200, and leaves its stack traces."""
    Job(SetUp("one process"), str(tmp_path / "runs")).write(tmp_path)
    fault.write(tmp_path, [fault.starve(at_step=13)])
    [ended] = run_workers([str(harmed.SCRIPT), str(tmp_path)], 1, timeout_s=200)
    assert [each.index for each in fault.fired(tmp_path)] == [0]
    assert ended.returncode == 200, ended.output
    assert "training hangs: worker-0 is in batch 2 of epoch 2" in ended.output
    assert 'harm.py", line' in ended.output
    assert len(list(tmp_path.glob("runs/hangs/*.txt"))) == 1
