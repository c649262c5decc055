"""Real processes that no longer get on: found, named, ended, and started again."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.cluster import Ended, run_job, run_workers

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[1] / "workers" / "hanging.py"

Outcome = dict[str, np.ndarray]
Train = Callable[..., tuple[list[Outcome], str, int]]

HUNG = r"worker-\d ended because training hung: "
# Its own sentinel is first, mostly.
LOCKED = rf"worker-{{0}} was killed by SIGABRT|{HUNG}worker-{{0}} did not answer"


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    @cache
    def train(workers: int, *told: str) -> tuple[list[Outcome], str, int]:
        """The outcome on each worker, what was printed, and the number of files of stacks."""
        folder = tmp_path_factory.mktemp("job")
        # A stopped worker sends no heartbeats, either: who is first, names it.
        options = ["--max-restarts", "9", "--heartbeat-timeout", "60"]
        ended = run_job([str(SCRIPT), str(folder), *told], workers, *options, timeout_s=500)
        assert ended.returncode == 0, ended.output
        assert not told or sorted((folder / "told").read_text().split()) == sorted(told)
        outcomes = [dict(np.load(folder / f"outcome-{w}.npz")) for w in range(workers)]
        return outcomes, ended.output, len(list(folder.glob("runs/hangs/*.txt")))

    return train


@pytest.mark.parametrize(
    ("workers", "hangs", "stacks"),
    [
        (
            1,
            {
                "0:0:1:0:locked": "worker-0 was killed by SIGABRT",
                "1:0:1:1:input": HUNG + r"worker-0 is in batch 1 of epoch 2, whose input is made "
                r"by hanging.py:\d+ in \S+, for \d+\.\d s",
            },
            1,
        ),
        (
            2,
            {
                "0:1:0:0:slow": None,
                "0:1:1:1:stopped": HUNG + r"worker-1 did not answer: stopped \(SIGSTOP\)",
                "1:1:2:1:input": HUNG + r"worker-1 waits for its input in batch \d of epoch 3, "
                r"whose input is made by hanging.py:\d+ in \S+, for \d+\.\d s",
            },
            3,
        ),
        pytest.param(
            2,
            {
                "0:1:0:0:slow": None,
                "0:1:1:1:stopped": HUNG + r"worker-1 did not answer: stopped \(SIGSTOP\)",
                "1:0:1:1:locked": LOCKED.format(0),
                "2:1:1:1:astray": HUNG + r"worker-1 runs hanging.py:\d+ in \S+, behind batch 1 of "
                r"epoch 2, for \d+\.\d s",
                "3:1:2:1:input": HUNG + r"worker-1 waits for its input in batch \d of epoch 3, "
                r"whose input is made by hanging.py:\d+ in \S+, for \d+\.\d s",
                "4:0:2:0:stopped": HUNG + r"worker-0 did not answer: stopped \(SIGSTOP\)",
            },
            6,
            marks=pytest.mark.soak,
        ),
        pytest.param(
            3,
            {
                "0:2:1:1:stopped": HUNG + r"worker-2 did not answer",
                "1:0:1:1:astray": HUNG + r"worker-0 runs hanging.py:\d+",
                "2:2:2:1:input": HUNG + r"worker-2 waits for its input",
                "3:1:2:1:locked": LOCKED.format(1),
            },
            8,
            marks=pytest.mark.soak,
        ),
    ],
    ids=["alone", "two workers", "two workers, all", "three workers"],
)
def test_hangs(train: Train, workers: int, hangs: dict[str, str | None], stacks: int) -> None:
    """Whoever hangs is named, all leave with their stacks, and the end is that of an undisturbed
    run. Who is slow, but in time, is waited for."""
    (expected, *_), _, _ = train(workers)
    outcomes, printed, kept = train(workers, *hangs)
    for worker, outcome in enumerate(outcomes):
        assert outcome.keys() == expected.keys()
        for name, array in expected.items():
            assert outcome[name].tobytes() == array.tobytes(), f"worker {worker}: {name}"
    causes = re.findall(r"^\[distplug\] (worker.*?)(?:; stopping all workers)?$", printed, re.M)
    expected_causes = [cause for cause in hangs.values() if cause is not None]
    assert len(causes) == len(expected_causes), causes
    for cause, found in zip(expected_causes, causes, strict=True):
        assert re.match(cause, found), found
    assert kept >= stacks
    # As `traceback` prints it, or `faulthandler`, where the interpreter's lock was kept.
    assert re.search(r'File "\S*hanging.py", line \d+,? in hang', printed)


def test_exit_code(tmp_path: Path) -> None:
    """Without a supervisor the process leaves with 200."""
    ended: Ended
    [ended] = run_workers([str(SCRIPT), str(tmp_path), "0:0:1:1:input"], 1, timeout_s=200)
    assert ended.returncode == 200, ended.output
    assert "training hangs: worker-0 is in batch 1 of epoch 2" in ended.output
    assert 'hanging.py", line' in ended.output
