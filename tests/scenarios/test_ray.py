"""Ray Train on this machine: two workers, one of which is killed."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.cluster import ROOT, environment, run_workers
from support.needed import missing
from support.watched import Watched

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

EXAMPLE = ROOT / "examples" / "ray_train.py"
WITHOUT_RAY = ROOT / "tests" / "workers" / "of_ray.py"
TIMEOUT_S = 500

State = dict[str, bytes]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> State:
    """The end of the same two workers without Ray, which is to change nothing."""
    if importlib.util.find_spec("ray") is None:
        missing("Ray", "Run pip install 'keras-distplug[ray]'.")
    home = tmp_path_factory.mktemp("undisturbed")
    ended = run_workers([str(WITHOUT_RAY), str(home)], 2, timeout_s=TIMEOUT_S)
    assert [each.returncode for each in ended] == [0, 0], ended[0].output
    first, second = states(home)
    assert first == second
    return first


@pytest.fixture
def folder() -> Iterator[Path]:
    """For Ray's own files, among them sockets, whose paths have to be short."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as name:
        yield Path(name)


def train(home: Path, folder: Path, *options: str) -> str:
    """What the example has printed, which leaves no process behind."""
    env = environment({"RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"})
    command = [sys.executable, str(EXAMPLE), "--directory", str(home), *options]
    example = Watched(command, env, home)
    try:
        code = example.code(TIMEOUT_S)
    finally:
        example.kill()
    assert code == 0, example.output
    return example.output


def states(home: Path) -> list[State]:
    """Of each worker, in the end: all variables and the History."""
    found = [np.load(home / f"worker-{rank}.npz") for rank in range(2)]
    return [{name: each[name].tobytes() for name in each.files} for each in found]


def processes_of(folder: Path) -> list[str]:
    """The command lines that name it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue  # gone
        if os.fsencode(folder) in line:
            found.append(line.replace(b"\0", b" ").decode(errors="replace"))
    return found


@pytest.mark.parametrize("kill", ["SIGKILL", pytest.param("SIGTERM", marks=pytest.mark.soak)])
def test_ray(kill: str, undisturbed: State, folder: Path, tmp_path: Path) -> None:
    """A worker dies in mid-epoch, or is told to go: Ray starts all of them again, in new processes,
    and they end with the bits of an undisturbed training."""
    printed = train(tmp_path, folder, "--kill", kill)
    killed = (tmp_path / "killed").read_text()
    starts = re.findall(r"pid=(\d+)\) world_rank=1,", printed)
    assert len(starts) == 2, printed
    assert killed == starts[0] != starts[1]
    assert re.search(r"resuming at epoch 3/6, batch \d+, step", printed), printed
    assert ("has ended with the checkpoint of step" in printed) == (kill == "SIGTERM")
    assert states(tmp_path) == [undisturbed] * 2
    assert processes_of(folder) == []
