"""One process on macOS or Windows, which lack signals, calls and files that Linux has.

Simulated: not run on macOS or Windows.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.cluster import ROOT, environment

pytestmark = pytest.mark.cluster

LIMITS = {
    "macOS": "a process that hangs in C code is not killed",
    "Windows": "SIGUSR1 and SIGUSR2 do not exist",
}


def run(system: str, folder: Path, what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tests/workers/laptop.py"), system, str(folder), what],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("system", ["macOS", "Windows"])
def test_interrupted(system: str, tmp_path: Path) -> None:
    """Training resumes mid-epoch, bit-identical to plain Keras, and the commands handle the run."""
    interrupted = run(system, tmp_path, "interrupted")
    assert "KeyboardInterrupt" in interrupted.stderr
    # Otherwise the next process, which cannot check whether this one is alive, would wait for 60 s.
    assert [*tmp_path.glob("runs/**/.owner/*.released")]
    resumed = run(system, tmp_path, "resumed")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert resumed.stdout.count("some protection is missing") == 1
    assert LIMITS[system] in resumed.stdout
    assert ": resuming at epoch" in resumed.stdout, resumed.stdout
    assert "keras-distplug run: error: Expected Linux" in resumed.stderr
