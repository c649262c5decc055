"""The terminal output of a job with several workers, as a user sees it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.cluster import run_job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).parents[1] / "workers" / "printing.py"


def test_progress_bars(tmp_path: Path) -> None:
    """Only the chief draws progress bars, although every worker calls plain `fit` and `evaluate`
    with `verbose="auto"`."""
    ended = run_job([str(SCRIPT), str(tmp_path / "runs")], 2, timeout_s=350)
    assert ended.returncode == 0, ended.output
    for worker in (0, 1):
        assert f"[worker-{worker}] evaluated" in ended.output
    bars = re.findall(r"\[(worker-\d)\] +(?:Epoch \d|\d/\d )", ended.output)
    assert bars.count("worker-0") >= 5
    assert bars.count("worker-1") == 0
