from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervision import await_until, is_dead

from keras_distplug.supervisor.attempt import await_end
from keras_distplug.supervisor.group import Ended, Group
from keras_distplug.supervisor.guard import become_subreaper
from keras_distplug.supervisor.launch import spawn
from keras_distplug.supervisor.output import Output
from keras_distplug.supervisor.signals import Interruptions


@pytest.fixture
def group() -> Iterator[Group]:
    with (
        Interruptions() as interruptions,
        Group(Output(["a", "b"], io.StringIO()), interruptions) as group,
    ):
        yield group


def wait_for_end(group: Group) -> Ended:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        ended, _ = group.wait(1.0)
        if ended:
            return ended[0]
    raise AssertionError("no worker ended within 20 s")


def read_pid(path: Path) -> int:
    await_until(lambda: path.exists() and path.read_text().endswith("\n"), f"{path} written")
    return int(path.read_text())


def test_exit_code(group: Group) -> None:
    """The end of a worker is reported once, with its return code."""
    group.add("a", spawn(["sh", "-c", "exit 3"], os.environ))
    ended = wait_for_end(group)
    assert (ended.worker, ended.returncode) == ("a", 3)
    assert not group.runs()
    assert not group.lives()


def test_leftover_processes(group: Group, tmp_path: Path) -> None:
    """Processes that a worker left behind keep the group alive, and are killed with it."""
    group.add("a", spawn(["sh", "-c", f"setsid sleep 60 & echo $! > {tmp_path}/pid"], os.environ))
    pid = read_pid(tmp_path / "pid")
    assert wait_for_end(group).returncode == 0
    assert not group.runs()
    # During an exec, a process has no environment to identify it by.
    await_until(group.lives, "the process to be known")
    group.kill()
    assert is_dead(pid)


@pytest.mark.parametrize("hidden", ["", "setsid -w ", "timeout 100 "])
def test_grace_for_grandchildren(group: Group, hidden: str, tmp_path: Path) -> None:
    """When SIGTERM kills a shell, the script that it started still gets its grace period."""
    script = (
        "import signal, sys, time, os; from pathlib import Path; here = Path(sys.argv[1])\n"
        "def save(*_): time.sleep(0.5); (here / 'saved').touch(); os._exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "(here / 'pid').write_text(f'{os.getpid()}\\n'); time.sleep(60)"
    )
    (tmp_path / "train.py").write_text(script)
    command = f"{hidden}python3 {tmp_path}/train.py {tmp_path}; true"
    group.add("a", spawn(["sh", "-c", command], os.environ))
    pid = read_pid(tmp_path / "pid")
    group.signal(signal.SIGTERM)
    ended, _ = await_end(group, grace_secs=20.0, hurry=True)
    assert ended[0].returncode == -signal.SIGTERM
    assert (tmp_path / "saved").exists()
    assert is_dead(pid)


def test_signals_wake_the_group(group: Group) -> None:
    """A signal to the supervisor ends the wait immediately."""
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    group.add("a", spawn(["sleep", "60"], os.environ))
    started_s = time.monotonic()
    assert group.wait(20.0) == ([], [signal.SIGTERM])
    assert time.monotonic() - started_s < 10
    timer.join()


def test_closing_kills(tmp_path: Path) -> None:
    """Closing the group kills all running processes."""
    with (
        Interruptions() as interruptions,
        Group(Output(["a"], io.StringIO()), interruptions) as group,
    ):
        command = f"trap '' TERM; echo $$ > {tmp_path}/pid; sleep 60"
        group.add("a", spawn(["sh", "-c", command], os.environ))
        pid = read_pid(tmp_path / "pid")
    assert is_dead(pid)


def test_handlers_are_restored() -> None:
    """The previous signal handlers are restored."""
    before = signal.getsignal(signal.SIGTERM)
    with Interruptions():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_zombies_of_a_worker(group: Group, tmp_path: Path) -> None:
    """Exited orphans do not remain zombies while the worker is running."""
    become_subreaper()
    script = f"(setsid true & echo $! > {tmp_path}/pid); exec sleep 60"
    group.add("a", spawn(["sh", "-c", script], os.environ))
    pid = read_pid(tmp_path / "pid")

    def is_gone() -> bool:
        group.wait(0.05)
        return not Path(f"/proc/{pid}").exists()

    await_until(is_gone, "the process gone")
    assert group.runs()
    group.kill()
