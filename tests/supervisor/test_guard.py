from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervision import await_until, is_dead

from keras_distplug.core import supervised
from keras_distplug.supervisor import guard
from keras_distplug.supervisor.guard import Guard

# Leaves its session and process group, and starts a child that does the same.
WANDERER = """
import os, subprocess, sys, time
if os.fork(): os._exit(0)
os.setsid()
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
with open(sys.argv[1], "w") as file: file.write(f"{os.getpid()} {child.pid}\\n")
time.sleep(60)
"""


@pytest.fixture
def job() -> Iterator[str]:
    name = uuid.uuid4().hex
    yield name
    guard.signal_all([guard.get_mark(name)], signal.SIGKILL)


def start(job: str, *command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=os.environ | {supervised.JOB: job})


def wander(job: str, folder: Path) -> list[int]:
    """Starts processes that hide, and returns their PIDs."""
    start(job, sys.executable, "-c", WANDERER, str(folder / "pids")).wait(20)
    pids = folder / "pids"
    await_until(lambda: pids.exists() and pids.read_text().endswith("\n"), "pids written")
    return [int(pid) for pid in pids.read_text().split()]


def test_mark_is_the_contracts_variable() -> None:
    """The guard identifies processes by the variable that the contract sets."""
    assert guard.get_mark("a") == f"{supervised.JOB}=a"


def test_hidden_processes_are_found(job: str, tmp_path: Path) -> None:
    """A process belongs to its job in any session, and to no other job."""
    pids = wander(job, tmp_path)
    assert guard.living([guard.get_mark(job)])
    guard.signal_all([guard.get_mark(job[:-1])], signal.SIGKILL)
    guard.signal_all([guard.get_mark("")], signal.SIGKILL)
    guard.signal_all([], signal.SIGKILL)
    assert not any(is_dead(pid) for pid in pids)
    guard.signal_all([guard.get_mark(job)], signal.SIGKILL)
    await_until(lambda: all(is_dead(pid) for pid in pids), "all are dead")
    assert not guard.living([guard.get_mark(job)])


def test_supervisor_that_dies(job: str, tmp_path: Path) -> None:
    """When the supervisor is dead, the guard kills the job, deletes its folder, and exits.

    Signals meant for the supervisor do not reach it.
    """
    folder = tmp_path / "job"
    folder.mkdir()
    pids = wander(job, tmp_path)
    lost = Guard(job, folder)
    late = start("another job", "sleep", "60")
    try:
        await_until(lambda: _ignores(lost._process.pid, signal.SIGTERM), "the guard is ready")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            lost._process.send_signal(number)
        assert lost._process.stdin is not None
        lost._process.stdin.close()
        assert lost._process.wait(20) == 0
        assert all(is_dead(pid) for pid in pids)
        assert not folder.exists()
        assert late.poll() is None
    finally:
        late.kill()
        late.wait(20)


def test_dismissed_guard(job: str, tmp_path: Path) -> None:
    """A dismissed guard kills no process and deletes nothing."""
    with start(job, "sleep", "60") as sleeper:
        with Guard(job, tmp_path) as dismissed:
            pass
        assert dismissed._process.returncode == 0
        assert sleeper.poll() is None
        sleeper.kill()
    assert tmp_path.exists()


def test_killed_guard(job: str, tmp_path: Path) -> None:
    """The death of the guard has no consequences."""
    with Guard(job, tmp_path) as killed:
        killed._process.kill()
        killed._process.wait(20)


def _ignores(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    [mask] = [line.split()[1] for line in status.splitlines() if line.startswith("SigIgn")]
    return bool(int(mask, 16) >> (number - 1) & 1)
