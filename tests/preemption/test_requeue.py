"""Requeuing, with a mock of Slurm's `scontrol`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.slurm import FakeSlurm

from keras_distplug.core.errors import ConfigurationError
from keras_distplug.preemption import requeue
from keras_distplug.preemption.requeue import Requeue

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("env", "job"),
    [
        ({}, "1234"),
        ({"SLURM_ARRAY_JOB_ID": "1200", "SLURM_ARRAY_TASK_ID": "0"}, "1200_0"),
    ],
    ids=["job", "task of an array"],
)
def test_requeued_job(env: dict[str, str], job: str, tmp_path: Path) -> None:
    """Exactly this job, or this task of an array, is requeued."""
    slurm = FakeSlurm(tmp_path / "bin")
    assert Requeue.from_environment(slurm.env | env).ask() == f"job {job} is in Slurm's queue again"
    assert slurm.asked() == [f"requeue {job}"]


# Output of Slurm 22.05 for a job whose processes received SIGTERM or a requested signal.
@pytest.mark.parametrize(
    ("shown", "restarts", "is_asked", "message"),
    [
        ("JobState=SIGNALING Reason=None Restarts=0", 0, True, "in Slurm's queue again"),
        ("JobState=COMPLETING Reason=None Restarts=0", 0, False, "was canceled, so it is not"),
        ("JobState=COMPLETING Reason=None Restarts=2", 2, False, "was canceled, so it is not"),
        ("JobState=CANCELLED Reason=None Restarts=0", 0, False, "was canceled, so it is not"),
        ("JobState=COMPLETING Reason=None Restarts=3", 2, False, "in Slurm's queue again"),
        ("JobState=COMPLETING Reason=TimeLimit Restarts=0", 0, True, "in Slurm's queue again"),
        (
            "JobState=COMPLETING Reason=None Restarts=0 EndTime=2026-11-27T10:36:49 "
            "PreemptTime=2026-11-27T10:36:48",
            0,
            True,
            "in Slurm's queue again",
        ),
        (
            "JobState=COMPLETING Reason=None Restarts=0 PreemptTime=None",
            0,
            False,
            "was canceled, so it is not",
        ),
        (
            "JobState=COMPLETING Reason=None Restarts=0 EndTime=2026-11-27T11:36:49 "
            "PreemptTime=2026-11-27T10:36:48",
            0,
            False,
            "was canceled, so it is not",
        ),
        (
            "JobState=COMPLETING Reason=None Restarts=0 Command=train Reason=TimeLimit Restarts=5",
            0,
            False,
            "was canceled, so it is not",
        ),
        ("of another version", 0, True, "in Slurm's queue again"),
    ],
    ids=[
        *("signal", "scancel", "scancel later", "canceled", "requeued", "time limit"),
        *("preempted", "not preempted", "preempted before", "text", "unknown"),
    ],
)
def test_jobs_that_are_not_requeued(
    shown: str, restarts: int, is_asked: bool, message: str, tmp_path: Path
) -> None:
    """A canceled or already requeued job is not requeued."""
    slurm = FakeSlurm(tmp_path / "bin", shown=shown)
    ours = Requeue.from_environment(slurm.env | {"SLURM_RESTART_COUNT": str(restarts)})
    assert message in ours.ask()
    assert slurm.asked() == ["requeue 1234"] * is_asked


def test_without_slurm(tmp_path: Path) -> None:
    """Outside a job, or without the program, requeuing is refused immediately."""
    slurm = FakeSlurm(tmp_path / "bin")
    with pytest.raises(ConfigurationError, match="no SLURM_JOB_ID"):
        Requeue.from_environment({"PATH": slurm.env["PATH"]})
    with pytest.raises(ConfigurationError, match="PATH without it"):
        Requeue.from_environment({"SLURM_JOB_ID": "1234", "PATH": str(tmp_path)})
    assert slurm.asked() == []


@pytest.mark.parametrize(
    ("then", "failure"),
    [
        ("echo 'Job may not be requeued' >&2; exit 3", "exit code 3: Job may not be requeued"),
        ("exit 1", "exit code 1: no output"),
        ("exec sleep 100", "no answer within 0.5 s"),
    ],
    ids=["refuses", "silent", "hangs"],
)
def test_failure(then: str, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure is reported; a program that hangs is abandoned."""
    monkeypatch.setattr(requeue, "_TIMEOUT_S", 0.5 if "sleep" in then else 20.0)
    slurm = FakeSlurm(tmp_path / "bin", then)
    message = Requeue.from_environment(slurm.env).ask()
    assert message.endswith(f"failed, so restart the job yourself: {failure}")
    if "sleep" not in then:  # that one may be abandoned before it has started
        assert slurm.asked() == ["requeue 1234"]


def test_program_that_cannot_start(tmp_path: Path) -> None:
    """A program that no longer exists is a failure like others."""
    slurm = FakeSlurm(tmp_path / "bin")
    ours = Requeue.from_environment(slurm.env)
    Path(ours.program).unlink()
    assert "yourself: it cannot be started: " in ours.ask()
