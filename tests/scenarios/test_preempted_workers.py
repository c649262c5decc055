"""Preemption of real processes by real signals: one step, one save, the right exit code."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support import fault
from support.cluster import Ended, run_job, run_workers
from support.fault import Fault
from support.slurm import FakeSlurm

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[1] / "workers" / "preempted.py"

Outcome = dict[str, np.ndarray]
Train = Callable[..., tuple[list[Outcome], str]]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    @cache
    def train(workers: int, *faults: Fault) -> tuple[list[Outcome], str]:
        """Returns the results of all workers and the output. Preemptions are not failures.

        Therefore no restart after a failure is allowed.
        """
        folder = tmp_path_factory.mktemp("job")
        fault.write(folder, faults)
        ended = run_job([str(SCRIPT), str(folder)], workers, "--max-restarts", "0", timeout_s=300)
        assert ended.returncode == 0, ended.output
        assert fired_faults(folder) == list(range(len(faults)))
        outcomes = [dict(np.load(folder / f"outcome-worker-{w}.npz")) for w in range(workers)]
        return outcomes, ended.output

    return train


def fired_faults(folder: Path) -> list[int]:
    """Returns the faults by their numbers; those of different workers occur in any order."""
    return sorted(each.index for each in fault.fired(folder))


def assert_same(outcomes: list[Outcome], expected: Outcome) -> None:
    for worker, outcome in enumerate(outcomes):
        assert outcome.keys() == expected.keys()
        for name, array in expected.items():
            assert outcome[name].tobytes() == array.tobytes(), f"worker {worker}: {name}"


ENDS = re.compile(r"(\w+) to worker-(\d) on \S+: training ends with the checkpoint of step (\d+);")
RESUMED = re.compile(r"resuming at epoch \d/5, (?:batch \d+, )?step (\d+)")


@pytest.mark.parametrize(
    ("workers", "faults", "times"),
    [
        (1, [fault.preempt(signal.SIGTERM, 0, 4)], 1),
        (
            2,
            [
                *[fault.preempt(signal.SIGTERM, 1, 2, "saving")]
                * 2,  # to one worker, twice, during a save
                fault.preempt(signal.SIGUSR1, 0, 7, after=2),  # to all
                fault.preempt(signal.SIGTERM, 1, 7, after=2),
                fault.preempt(signal.SIGUSR2, 0, 11),  # to the chief
            ],
            3,
        ),
        pytest.param(
            3,
            [fault.preempt(signal.SIGUSR2, 2, 3), fault.preempt(signal.SIGTERM, 0, 5)],
            2,
            marks=pytest.mark.soak,
        ),
    ],
    ids=["alone", "two workers", "three workers"],
)
def test_preempted_together(train: Train, workers: int, faults: list[Fault], times: int) -> None:
    """One worker is notified, or all, or one twice during a save: all stop after the same step.

    They resume from the checkpoint of that step, and the result is that of an uninterrupted run.
    """
    (expected, *others), _ = train(workers)
    assert_same(others, expected)
    outcomes, printed = train(workers, *faults)
    assert_same(outcomes, expected)
    steps = [step for *_, step in ENDS.findall(printed)]
    assert len(steps) == times
    assert RESUMED.findall(printed) == steps
    assert len(re.findall("was preempted after saving a checkpoint", printed)) >= len(steps)


def test_exit_codes(tmp_path: Path) -> None:
    """Without a supervisor, every worker exits with 143; one of them has called `scontrol`."""
    slurm = FakeSlurm(tmp_path / "bin")
    fault.write(tmp_path, [fault.preempt(signal.SIGTERM, worker=1, at_step=4)])
    ended = run_workers([str(SCRIPT), str(tmp_path)], 2, env=slurm.env, timeout_s=200)
    assert [each.returncode for each in ended] == [143, 143], ended[0].output
    assert fired_faults(tmp_path) == [0]
    assert slurm.asked() == ["requeue 1234"]
    assert ended[0].output.count("job 1234 is in Slurm's queue again") == 1


@pytest.mark.parametrize(
    "preemption",
    [
        fault.preempt(signal.SIGTERM, worker=1, at_step=4),
        pytest.param(
            fault.preempt(signal.SIGTERM, worker=1, moment="before fit"), marks=pytest.mark.soak
        ),
    ],
    ids=str,
)
def test_preemption_notice_of_tensorflow(preemption: Fault, tmp_path: Path) -> None:
    """A SIGTERM that only TensorFlow receives also makes all workers save and exit."""
    fault.write(tmp_path, [preemption])
    ended = run_workers(
        [str(SCRIPT), str(tmp_path)],
        2,
        env={"KERAS_DISTPLUG_TEST_NO_SIGNALS": "1"},
        timeout_s=200,
    )
    assert [each.returncode for each in ended] == [143, 143], ended[0].output
    assert fired_faults(tmp_path) == [0]
    said = "TensorFlow's preemption notice to worker-1: training ends with the checkpoint of"
    assert ended[0].output.count(said) == 1
    assert not any("Fatal Python error" in each.output for each in ended)


def test_ctrl_c(tmp_path: Path) -> None:
    """Ctrl-C to one worker ends the job with 130, with a checkpoint and without a restart."""
    fault.write(tmp_path, [fault.preempt(signal.SIGINT, worker=1, at_step=4)])
    ended = run_job([str(SCRIPT), str(tmp_path)], 2, "--max-restarts", "3", timeout_s=200)
    assert ended.returncode == 130, ended.output
    assert fired_faults(tmp_path) == [0]
    assert ENDS.search(ended.output), ended.output
    assert "not restarted: the user pressed Ctrl-C; exit code 130" in ended.output


def test_preempted_while_another_is_frozen(train: Train) -> None:
    """A worker that waits for a frozen one in a collective notices a signal meanwhile.

    All stop after the same step when that worker continues.
    """
    (expected, *_), _ = train(2)
    outcomes, printed = train(2, fault.stop(1, at_step=3), fault.own("wake", 0, at_step=3))
    assert_same(outcomes, expected)
    assert len(ENDS.findall(printed)) == 1


def test_ctrl_c_twice(tmp_path: Path) -> None:
    """The second Ctrl-C ends a worker that waits for a frozen chief, which cannot answer."""
    fault.write(tmp_path, [fault.stop(0, at_step=3), fault.own("twice", 1, at_step=3)])
    ended = run_job([str(SCRIPT), str(tmp_path)], 2, timeout_s=200)
    assert ended.returncode == 130, ended.output
    assert fired_faults(tmp_path) == [0, 1]
    assert "not restarted: " in ended.output
    assert not ENDS.search(ended.output)


def test_signal_after_training(tmp_path: Path) -> None:
    """A signal after training ends the process as it would without this package."""
    fault.write(tmp_path, [fault.preempt(signal.SIGTERM, moment="end")])
    ended: Ended
    [ended] = run_workers([str(SCRIPT), str(tmp_path)], 1, timeout_s=200)
    assert ended.returncode == -15, ended.output
    assert fired_faults(tmp_path) == [0]
    assert (tmp_path / "outcome-worker-0.npz").exists()
    assert not ENDS.search(ended.output)
