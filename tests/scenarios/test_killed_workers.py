"""Real processes, real signals: the end must be that of the run nobody disturbed, to the bit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from support.cluster import run_job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[1] / "workers" / "faulty.py"

Outcome = dict[str, np.ndarray]
Train = Callable[..., tuple[list[Outcome], str]]
Events = list[dict[str, Any]]


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
        return outcomes_in(folder, workers), ended.output

    return train


def run_supervised(
    folder: Path, workers: int, options: list[str], way: str, *faults: str, ends_with: int = 0
) -> tuple[Events, str]:
    """What the supervisor has logged, and what was printed."""
    log = folder / "events"
    command = [str(SCRIPT), str(folder), way, *faults]
    ended = run_job(command, workers, *options, f"--log={log}", timeout_s=450)
    assert ended.returncode == ends_with, ended.output
    return [json.loads(line) for line in log.read_text().splitlines()], ended.output


def outcomes_in(folder: Path, workers: int) -> list[Outcome]:
    """What each worker ended with, and what callbacks of Keras have written; only the chief did."""
    written = {"log.csv": np.array((folder / "log.csv").read_text())}
    with h5py.File(folder / "best.weights.h5") as file:
        file.visititems(
            lambda name, item: (
                written.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None
            )
        )
    # Their names end in the writer's number, and one of its own.
    writers = {each.name.split(".")[-3] for each in (folder / "logs").glob("train/events.*")}
    assert writers <= set((folder / "pids-0").read_text().split())
    assert writers
    return [written | dict(np.load(folder / f"outcome-{w}.npz")) for w in range(workers)]


def first_causes(events: Events) -> list[tuple[str, str, int]]:
    """Of each attempt that failed, the first one."""
    attempts = {each["attempt"] for each in events if each["event"] == "failed"}
    failed = [
        next(each for each in events if (each["event"], each["attempt"]) == ("failed", attempt))
        for attempt in sorted(attempts)
    ]
    return [(each["worker"], each["cause"], each["exit_code"]) for each in failed]


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


WAYS_TO_DIE = ["0:0:2:1:segv", "1:1:begin:raise", "2:1:3:0:abort"]


@pytest.mark.parametrize(
    ("workers", "faults"),
    [
        (2, WAYS_TO_DIE),
        pytest.param(3, WAYS_TO_DIE, marks=pytest.mark.soak),
        pytest.param(
            3, ["0:2:2:1:raise", "1:0:begin:kill", "2:0:3:0:abort"], marks=pytest.mark.soak
        ),
    ],
)
def test_ways_to_die(train: Train, tmp_path: Path, workers: int, faults: list[str]) -> None:
    """Signals of a crash, an exception, and a death while training is being taken up again, with
    spares that take the dead ones' places: each cause is named, and the end is as if undisturbed.
    """
    (expected, *_), _ = train(workers, "distributed_fit")
    events, printed = run_supervised(
        tmp_path, workers, ["--warm-spares"], "distributed_fit", *faults
    )
    assert (tmp_path / "faults").read_text().split() == faults
    assert_same(outcomes_in(tmp_path, workers), expected)
    codes = {"segv": 139, "abort": 134, "kill": 137, "raise": 1}
    assert first_causes(events) == [
        (f"worker-{fault.split(':')[1]}", "FAILED", codes[fault.split(":")[-1]]) for fault in faults
    ], printed
    started = [each for each in events if each["event"] == "started"]
    assert [bool(each["spares"]) for each in started] == [False, True, False, True]
    assert "3 restarts\n" in printed


def test_fewer_workers(train: Train, tmp_path: Path) -> None:
    """Where a worker fails again, the other one goes on alone, with the same data in the same
    order: it ends where both would have ended, but for rounding."""
    (expected, *_), _ = train(2, "distributed_fit")
    faults = ["0:1:1:1:raise", "1:1:2:0:raise"]
    events, printed = run_supervised(tmp_path, 2, ["--min-workers=1"], "in_epoch", *faults)
    assert (tmp_path / "faults").read_text().split() == faults
    started = [each for each in events if each["event"] == "started"]
    assert [each["slots"] for each in started] == [[0, 1], [0, 1], [0]]
    [outcome] = outcomes_in(tmp_path, 1)
    assert outcome.keys() == expected.keys()
    for name, array in expected.items():
        if array.dtype.kind == "f":
            np.testing.assert_allclose(outcome[name], array, rtol=1e-4, atol=1e-5, err_msg=name)
    assert "1 worker completed training" in printed


def test_crash_loop(tmp_path: Path) -> None:
    """A script that fails at the same place each time is given up, with the code for that, its
    cause, and its newest checkpoint left."""
    events, printed = run_supervised(
        tmp_path, 1, ["--warm-spares"], "distributed_fit", "any:0:2:1:raise", ends_with=93
    )
    assert (tmp_path / "faults").read_text().split() == ["any:0:2:1:raise"] * 4
    assert first_causes(events) == [("worker-0", "FAILED", 1)] * 4
    assert events[-1]["exit_code"] == 93
    assert "RuntimeError: so it was told" in printed
    assert "3 attempts in a row made no newer checkpoint (--max-without-progress)" in printed
    assert "first failure: worker-0 exited with code 1 at " in printed
    assert list((tmp_path / "runs").glob("run-0001/step-*/*MANIFEST*")), printed
