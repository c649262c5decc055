"""Real processes, real signals: the end must be that of the run nobody disturbed, to the bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.cluster import run_job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[1] / "workers" / "faulty.py"

Outcome = dict[str, np.ndarray]
Train = Callable[..., tuple[list[Outcome], str]]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    @cache
    def train(workers: int, way: str, *faults: str) -> tuple[list[Outcome], str]:
        """The outcome on each worker and what was printed; every fault happened, exactly once."""
        folder = tmp_path_factory.mktemp("job")
        script = [str(SCRIPT), str(folder), way, *faults]
        ended = run_job(script, workers, timeout_s=450)
        assert ended.returncode == 0, ended.output
        fired = (folder / "faults").read_text().split() if faults else []
        assert fired == list(faults)
        outcomes = [dict(np.load(folder / f"outcome-{w}.npz")) for w in range(workers)]
        return outcomes, ended.output

    return train


def assert_same(outcomes: list[Outcome], expected: Outcome) -> None:
    for worker, outcome in enumerate(outcomes):
        assert outcome.keys() == expected.keys()
        for name, array in expected.items():
            assert outcome[name].dtype == array.dtype, f"worker {worker}: {name}"
            assert outcome[name].tobytes() == array.tobytes(), f"worker {worker}: {name}"


@pytest.mark.parametrize(
    ("way", "fault"),
    [
        ("distributed_fit", "0:0:2:1:kill"),
        ("in_epoch", "0:1:1:1:kill"),
        ("distributed_fit", "0:1:3:2:leave"),
    ],
)
def test_two_workers(train: Train, way: str, fault: str) -> None:
    """A job whose chief or other worker dies, or leaves with code 0, ends as if undisturbed."""
    (expected, *others), _ = train(2, "distributed_fit")
    assert_same(others, expected)
    outcomes, printed = train(2, way, fault)
    assert_same(outcomes, expected)
    assert bool(re.search(r"resuming at epoch 2/4, batch 2", printed)) is (way == "in_epoch")
    worker, what = fault.split(":")[1], fault.split(":")[-1]
    cause = "was killed by SIGKILL" if what == "kill" else "left without completing training"
    assert re.search(rf"worker-{worker} {cause}.*; stopping all workers", printed)
    assert "training again" in printed
    assert "1 restart\n" in printed


def test_two_deaths_of_a_plain_fit(train: Train) -> None:
    """`model.fit(..., callbacks=kd.defaults())` survives the chief, and then the other worker."""
    (expected, *others), _ = train(2, "plain_fit")
    assert_same(others, expected)
    outcomes, printed = train(2, "plain_in_epoch", "0:0:1:2:kill", "1:1:3:0:kill")
    assert_same(outcomes, expected)
    assert "2 restarts\n" in printed


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["0:0:2:0:kill", "0:2:2:1:kill"])
def test_three_workers(train: Train, fault: str) -> None:
    """The same with three workers, for the chief and for the last one."""
    (expected, *others), _ = train(3, "distributed_fit")
    assert_same(others, expected)
    outcomes, _ = train(3, "distributed_fit", fault)
    assert_same(outcomes, expected)


@pytest.mark.parametrize("what", ["kill", "lose"])
def test_local_tier(train: Train, what: str) -> None:
    """Where only local checkpoints were made, a job goes on from the newest that both workers have;
    without those of one it trains anew. Either way it ends as if undisturbed."""
    (expected, *others), _ = train(2, "distributed_fit")
    assert_same(others, expected)
    outcomes, printed = train(2, "local_tier", f"0:1:2:1:{what}")
    assert_same(outcomes, expected)
    resumed = re.search(r"local checkpoint .*: resuming at epoch [23]/4", printed)
    assert bool(resumed) is (what == "kill"), printed
