"""Ray Train on this machine: two workers, one of which is killed; lost and added nodes."""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.cluster import ROOT, environment, run_workers
from support.needed import missing
from support.processes import naming
from support.trained_samples import Attempt, assert_close, trained
from support.watched import Watched

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

EXAMPLE = ROOT / "examples" / "ray_train.py"
WORKERS = ROOT / "tests" / "workers"
TWO = Attempt(2)
TIMEOUT_S = 500

State = dict[str, bytes]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of the same training without Ray, which makes no difference."""
    if importlib.util.find_spec("ray") is None:
        missing("Ray", "Run pip install 'ray[train]'.")

    def uninterrupted(script: str, *arguments: str) -> Path:
        home = tmp_path_factory.mktemp("uninterrupted")
        command = [str(WORKERS / script), str(home), *arguments]
        ended = run_workers(command, 2, timeout_s=TIMEOUT_S)
        assert [each.returncode for each in ended] == [0, 0], ended[0].output
        return home

    return uninterrupted


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for Ray's own files, including sockets, whose paths must be short."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as name:
        yield Path(name)


def train(home: Path, folder: Path, *command: str) -> str:
    """Returns the output of the driver, which leaves no process behind."""
    # The last variable is the time that Ray waits for a node before it counts as dead.
    options = {
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",
    }
    driver = Watched([sys.executable, *command], environment(options), home)
    try:
        code = driver.code(TIMEOUT_S)
    finally:
        driver.kill()
    assert code == 0, driver.output
    assert naming(folder) == []
    return driver.output


def states(home: Path) -> list[State]:
    """Returns the final state of every worker: all variables and the History."""
    found = [np.load(home / f"worker-{rank}.npz") for rank in range(2)]
    return [{name: each[name].tobytes() for name in each.files} for each in found]


@pytest.mark.parametrize("kill", ["SIGKILL", pytest.param("SIGTERM", marks=pytest.mark.soak)])
def test_ray(kill: str, uninterrupted: Callable[..., Path], folder: Path, tmp_path: Path) -> None:
    """A worker dies or is preempted mid-epoch: Ray restarts all workers in new processes.

    The result is bit-identical to an uninterrupted training.
    """
    expected = states(uninterrupted("of_ray.py"))
    printed = train(tmp_path, folder, str(EXAMPLE), "--directory", str(tmp_path), "--kill", kill)
    killed = (tmp_path / "killed").read_text()
    starts = re.findall(r"pid=(\d+)\) world_rank=1,", printed)
    assert len(starts) == 2, printed
    assert killed == starts[0] != starts[1]
    assert re.search(r"resuming at epoch 3/6, batch \d+, step", printed), printed
    assert ("has ended with the checkpoint of step" in printed) == (kill == "SIGTERM")
    assert states(tmp_path) == expected == [expected[0]] * 2


@pytest.mark.parametrize(
    ("kind", "attempts"),
    [("replaced", [TWO, TWO]), ("elastic", [TWO, Attempt(1), TWO])],
    ids=["replaced", "elastic"],
)
def test_nodes(
    kind: str,
    attempts: list[Attempt],
    uninterrupted: Callable[..., Path],
    folder: Path,
    tmp_path: Path,
) -> None:
    """A node is lost mid-epoch.

    If another one replaces it, the result is bit-identical. Otherwise one worker continues alone
    until a node is added: every batch has the same samples in the same order, and the result is the
    same except for rounding.
    """
    home = uninterrupted("samples.py", "tf.data")
    printed = train(tmp_path, folder, str(WORKERS / "ray_nodes.py"), str(tmp_path), kind)
    kills = (tmp_path / "kills").read_text().split()
    assert kills == ["1:1:3", "0:2:3"][: len(attempts) - 1], printed
    sizes = re.findall(r"Started training worker group of size (\d)", printed)
    assert sizes == [str(attempt.workers) for attempt in attempts], printed

    assert trained(tmp_path, attempts) == trained(home, [TWO])
    expected = dict(np.load(home / "outcome-0.npz"))
    for worker in range(2):
        outcome = dict(np.load(tmp_path / f"outcome-{worker}.npz"))
        assert_close(outcome, expected)
        if kind == "replaced":
            for name, array in expected.items():
                assert outcome[name].tobytes() == array.tobytes(), name
