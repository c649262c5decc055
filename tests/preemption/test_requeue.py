"""Asking a program that stands in for Slurm's `scontrol`."""

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
def test_which_job(env: dict[str, str], job: str, tmp_path: Path) -> None:
    """Slurm is asked for this job, or this task of an array, and no other one."""
    slurm = FakeSlurm(tmp_path / "bin")
    assert Requeue.from_environment(slurm.env | env).ask() is None
    assert slurm.asked() == [f"requeue {job}"]


def test_nothing_to_ask(tmp_path: Path) -> None:
    """Outside a job, or without the program, it is refused at once."""
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
        ("exit 1", "exit code 1: it says nothing"),
        ("exec sleep 100", "it has not answered within 0.5 s"),
    ],
    ids=["refuses", "silent", "hangs"],
)
def test_failure(then: str, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails is told; what hangs is given up."""
    monkeypatch.setattr(requeue, "_TIMEOUT_S", 0.5 if "sleep" in then else 20.0)
    slurm = FakeSlurm(tmp_path / "bin", then)
    assert Requeue.from_environment(slurm.env).ask() == failure
    if "sleep" not in then:  # which may be given up before it has begun
        assert slurm.asked() == ["requeue 1234"]


def test_program_that_cannot_start(tmp_path: Path) -> None:
    """A program that is gone by then is a failure like others."""
    slurm = FakeSlurm(tmp_path / "bin")
    ours = Requeue.from_environment(slurm.env)
    Path(ours.program).unlink()
    assert (ours.ask() or "").startswith("it cannot be started: ")
