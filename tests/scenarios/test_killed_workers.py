"""Real processes and real signals: the result is bit-identical to an uninterrupted run."""

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
from support import fault
from support.cluster import run_job
from support.fault import Fault
from support.harmed import Outcome, differences

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[1] / "workers" / "faulty.py"

Train = Callable[..., tuple[list[Outcome], str]]
Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    @cache
    def train(workers: int, way: str, *faults: Fault) -> tuple[list[Outcome], str]:
        """Returns the results of all workers and the output; every fault occurred exactly once."""
        folder = tmp_path_factory.mktemp("job")
        fault.write(folder, faults)
        ended = run_job([str(SCRIPT), str(folder), way], workers, timeout_s=450)
        assert ended.returncode == 0, ended.output
        assert [each.index for each in fault.fired(folder)] == list(range(len(faults)))
        return outcomes_in(folder, workers), ended.output

    return train


def run_supervised(
    folder: Path, workers: int, options: list[str], way: str, *faults: Fault, ends_with: int = 0
) -> tuple[Events, str]:
    """Returns the supervisor's log and the output."""
    log = folder / "events"
    fault.write(folder, faults)
    command = [str(SCRIPT), str(folder), way]
    ended = run_job(command, workers, *options, f"--log={log}", timeout_s=450)
    assert ended.returncode == ends_with, ended.output
    return [json.loads(line) for line in log.read_text().splitlines()], ended.output


def outcomes_in(folder: Path, workers: int) -> list[Outcome]:
    """Returns the workers' results, and the files of Keras' callbacks, written only by the
    chief."""
    written = {"log.csv": np.array((folder / "log.csv").read_text())}
    with h5py.File(folder / "best.weights.h5") as file:
        file.visititems(
            lambda name, item: (
                written.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None
            )
        )
    # Their names end with the writer's number and a number per file.
    writers = {each.name.split(".")[-3] for each in (folder / "logs").glob("train/events.*")}
    assert writers <= set((folder / "pids-0").read_text().split())
    assert writers
    return [written | dict(np.load(folder / f"outcome-{w}.npz")) for w in range(workers)]


def first_causes(events: Events) -> list[tuple[str, str, int]]:
    """Returns the first cause of every failed attempt."""
    attempts = {each["attempt"] for each in events if each["event"] == "failed"}
    failed = [
        next(each for each in events if (each["event"], each["attempt"]) == ("failed", attempt))
        for attempt in sorted(attempts)
    ]
    return [(each["worker"], each["cause"], each["exit_code"]) for each in failed]


def assert_same(outcomes: list[Outcome], expected: Outcome) -> None:
    assert [differences(outcome, expected) for outcome in outcomes] == [[]] * len(outcomes)


@pytest.mark.parametrize(
    ("way", "what"),
    [
        pytest.param("distributed_fit", fault.kill(0, at_step=7), marks=pytest.mark.soak),
        ("in_epoch", fault.kill(1, at_step=5)),
        pytest.param("distributed_fit", fault.leave(1, at_step=11), marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_two_workers(train: Train, way: str, what: Fault) -> None:
    """A job whose chief or other worker dies, or exits with code 0, ends as if uninterrupted."""
    (expected, *others), _ = train(2, "distributed_fit")
    assert_same(others, expected)
    outcomes, printed = train(2, way, what)
    assert_same(outcomes, expected)
    in_epoch = re.search(r"resuming at epoch 2/4, batch [23]", printed)
    assert bool(in_epoch) is (way == "in_epoch")
    cause = "was killed by SIGKILL" if what.kind == "kill" else "exited without completing training"
    assert re.search(rf"{what.who} {cause}.*; stopping all workers", printed)
    assert "training again" in printed
    assert "1 restart\n" in printed


def test_two_deaths_of_a_plain_fit(train: Train) -> None:
    """`model.fit(..., callbacks=kd.defaults())` survives the death of the chief and of the other
    worker."""
    (expected, *others), _ = train(2, "plain_fit")
    assert_same(others, expected)
    deaths = (fault.kill(0, at_step=5), fault.kill(1, at_step=9))
    outcomes, printed = train(2, "plain_in_epoch", *deaths)
    assert_same(outcomes, expected)
    assert "2 restarts\n" in printed


@pytest.mark.soak
@pytest.mark.parametrize("what", [fault.kill(0, at_step=6), fault.kill(2, at_step=7)], ids=str)
def test_three_workers(train: Train, what: Fault) -> None:
    """The same with three workers, for the chief and the last worker."""
    (expected, *others), _ = train(3, "distributed_fit")
    assert_same(others, expected)
    outcomes, _ = train(3, "distributed_fit", what)
    assert_same(outcomes, expected)


@pytest.mark.parametrize("what", [fault.kill(1, at_step=7), fault.lose(1, at_step=7)], ids=str)
def test_local_tier(train: Train, what: Fault) -> None:
    """With only local checkpoints, a job resumes from the newest one that both workers have.

    If one worker has lost its own, training starts from scratch. The result is the same either way.
    """
    (expected, *others), _ = train(2, "distributed_fit")
    assert_same(others, expected)
    outcomes, printed = train(2, "local_tier", what)
    assert_same(outcomes, expected)
    resumed = re.search(r"local checkpoint .*: resuming at epoch [23]/4", printed)
    assert bool(resumed) is (what.kind == "kill"), printed


def test_fewer_workers(train: Train, tmp_path: Path) -> None:
    """If a worker keeps failing, the other one continues alone, with the same data and order.

    The result is the same, except for rounding.
    """
    (expected, *_), _ = train(2, "distributed_fit")
    faults = [fault.error(1, at_step=4), fault.error(1, at_step=6)]
    events, printed = run_supervised(tmp_path, 2, ["--min-workers=1"], "in_epoch", *faults)
    assert [each.index for each in fault.fired(tmp_path)] == [0, 1]
    started = [each for each in events if each["event"] == "started"]
    assert [each["slots"] for each in started] == [[0, 1], [0, 1], [0]]
    [outcome] = outcomes_in(tmp_path, 1)
    assert outcome.keys() == expected.keys()
    for name, array in expected.items():
        if array.dtype.kind == "f":
            np.testing.assert_allclose(outcome[name], array, rtol=1e-4, atol=1e-5, err_msg=name)
    assert "1 worker completed training" in printed


def test_crash_loop(tmp_path: Path) -> None:
    """A script that always fails at the same place is given up, with code 93 and the cause.

    Its newest checkpoint remains.
    """
    always = fault.error(0, at_step=7, every_time=True)
    events, printed = run_supervised(tmp_path, 1, [], "distributed_fit", always, ends_with=93)
    fired = [each.index for each in fault.fired(tmp_path)]
    # One more if the first attempt fails before its checkpoint is committed, on a busy machine.
    assert fired in ([0] * 4, [0] * 5)
    assert first_causes(events) == [("worker-0", "FAILED", 1)] * len(fired)
    assert events[-1]["exit_code"] == 93
    assert "RuntimeError: requested by the test" in printed
    assert "3 consecutive attempts without a newer checkpoint (--max-without-progress)" in printed
    assert "first failure: worker-0 exited with code 1 at " in printed
    assert list((tmp_path / "runs").glob("run-0001/step-*/*MANIFEST*")), printed
