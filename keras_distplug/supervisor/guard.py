"""Finds all processes of a job, and kills them if the supervisor dies.

A job's processes have the job's name in their environment, and a worker's processes also the
worker's mark. Child processes inherit both, even in a different process group or session. A process
may overwrite its environment by changing its title, or clear it; therefore the workers' sessions
and the descendants of the processes in them count as well, and so do orphans that have become
children of this process if it is a "subreaper".

The guard is a small process that waits for a farewell from the supervisor. If the pipe between them
closes without one, the supervisor is dead, and the guard kills the job.

Standard library only, and run as a file, so that it works with any `sys.path` of the supervisor.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_JOB = "KERAS_DISTPLUG_JOB"  # `core.supervised.JOB`, which cannot be imported here
_FAREWELL = "farewell"
_SESSION_ENDED = -2  # instead of the start time of a session's leader: the session has ended
_SET_CHILD_SUBREAPER = 36  # prctl(2)
_POLL_SECS = 0.02
# If the supervisor is killed while it starts a worker, that has no mark until its program runs.
_QUIET_SECS = 1.0


def get_mark(job: str) -> str:
    """Returns the environment entry of all processes of a job."""
    return f"{_JOB}={job}"


def living(marks: Collection[str], *, adopted: bool = False) -> bool:
    """Returns True while a process with one of these marks, or one that belongs to it, is running.

    Args:
        marks: Environment entries of the processes.
        adopted: True to include the orphans of `adopting_orphans`. Defaults to False.
    """
    return bool(find_pids(marks, adopted=adopted))


def kill_all(marks: Collection[str], timeout_secs: float) -> None:
    """Kills all processes of `living`, and waits up to `timeout_secs` seconds for their exit."""
    deadline = time.monotonic() + timeout_secs
    while living(marks) and time.monotonic() < deadline:
        signal_all(marks, signal.SIGKILL)
        time.sleep(_POLL_SECS)


def signal_all(marks: Collection[str], number: signal.Signals, *, adopted: bool = False) -> None:
    """Sends a signal to all processes of `living`."""
    for pid, start in find_pids(marks, adopted=adopted).items():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            pidfd = os.pidfd_open(pid)
            try:
                # Checked again, because only from here on the PID cannot be reused.
                found = _read_stat(pid)
                if found is not None and found.start == start:
                    signal.pidfd_send_signal(pidfd, number)
            finally:
                os.close(pidfd)


_started: set[int] = set()
_sessions: dict[str, dict[int, int]] = {}  # by mark: start times of the sessions' leaders
_adopted: dict[int, int] = {}  # the same for orphans
_guards: list[Guard] = []
_earlier_sessions: set[int] = set()  # sessions of earlier children of this process
_adopts = threading.Event()


def become_subreaper() -> None:
    """Makes orphaned descendants children of this process, which can then wait for their exit."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Within this context, orphaned descendants in their own sessions count as the workers'.

    This process must not start anything else meanwhile.
    """
    with contextlib.suppress(OSError, AttributeError):  # not permitted or not supported
        become_subreaper()
        # The first process of a container also gets the orphans of all other processes.
        if os.getpid() != 1:
            _earlier_sessions.update(os.getsid(pid) for pid in _children())
            _adopts.set()
    try:
        yield
    finally:
        _adopts.clear()
        _adopted.clear()
        _earlier_sessions.clear()


def note_child(pid: int) -> None:
    """Records a child that this process has started and will wait for."""
    _started.add(pid)


def note_worker(pid: int, mark: str) -> None:
    """Records a worker, which is a child that leads its own session."""
    note_child(pid)
    _note_session(pid, _sessions.setdefault(mark, {}))


def _note_session(leader: int, sessions: dict[int, int]) -> None:
    if leader in sessions:
        return
    found = _read_stat(leader)
    sessions[leader] = -1 if found is None else found.start  # the leader may have exited
    for each in _guards:
        each.report_session(leader, sessions[leader])


def forget_child(pid: int) -> None:
    """Removes a child that has exited, because its PID may be reused."""
    _started.discard(pid)


def reap_orphans() -> None:
    """Reaps orphans that have become children of this process, and have exited.

    Workers and their orphans are in their own sessions. A child in this process's own session
    belongs to another part of the program: the caller of `run` may have child processes.
    """
    ours = os.getsid(0)
    for pid in _children():
        with contextlib.suppress(OSError):
            session = os.getsid(pid)
            is_orphan = pid not in _started and session != ours
            is_alive = is_orphan and os.waitpid(pid, os.WNOHANG) == (0, 0)
            if is_alive and _adopts.is_set() and session not in _earlier_sessions:
                _note_session(session, _adopted)


def _children() -> list[int]:
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        # A thread may have finished, or the kernel may not list its children.
        with contextlib.suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


@dataclass(frozen=True)
class _Stat:
    """A process as described by the kernel."""

    is_running: bool
    parent: int
    session: int
    start: int  # in ticks


def _read_stat(pid: int) -> _Stat | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None  # exited
    fields = stat.rpartition(b")")[2].split()
    return _Stat(fields[0] not in b"ZX", int(fields[1]), int(fields[3]), int(fields[19]))


def find_pids(marks: Collection[str], *, adopted: bool = False) -> dict[int, int]:
    """Returns the PIDs of the running processes, with their start times."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    table = {pid: found for pid in pids if (found := _read_stat(pid)) is not None}
    noted = [_sessions.get(mark, {}) for mark in marks]
    sessions = {
        leader
        for each in [*noted, *([_adopted] if adopted else [])]
        for leader, start in each.items()
        # The number of a session that has ended may have been reused.
        if leader not in table or table[leader].start == start
    }
    children: dict[int, list[int]] = {}
    for pid, found in table.items():
        children.setdefault(found.parent, []).append(pid)
    belonging = {
        pid for pid, found in table.items() if found.session in sessions or _has_mark(marks, pid)
    }
    left = list(belonging)
    while left:
        started = [pid for pid in children.get(left.pop(), ()) if pid not in belonging]
        belonging.update(started)
        left += started
    for each in [*noted, *([_adopted] if adopted else [])]:
        for leader in each.keys() - {found.session for found in table.values()}:
            del each[leader]  # the session has ended, and its number may be reused
            for guard in _guards:
                guard.report_session(leader, _SESSION_ENDED)
    return {
        pid: table[pid].start for pid in belonging if table[pid].is_running and _may_signal(pid)
    }


def _may_signal(pid: int) -> bool:
    """Returns False for a process of another user, such as one started with sudo."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    except OSError:
        return True  # exited
    return True


def _has_mark(marks: Collection[str], pid: int) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False  # exited, or another user's
    # A zombie has no environment.
    return not {mark.encode() for mark in marks}.isdisjoint(environ.split(b"\0"))


class Guard:
    """The supervisor's end of the guard. A context manager that sends the farewell on exit.

    Args:
        job: Name of the job to kill if the supervisor dies.
        folder: Folder of the job, which is then deleted.
    """

    def __init__(self, job: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, job, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,  # otherwise a failed write would be repeated later
            start_new_session=True,
        )
        note_child(self._process.pid)

    def report_session(self, leader: int, start: int) -> None:
        """Sends the guard a session of the job, with the start time of its leader."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the guard has exited
            self._process.stdin.write(f"{leader} {start}\n".encode())
            self._process.stdin.flush()

    def __enter__(self) -> Self:
        _guards.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _guards.remove(self)
        try:
            self._process.communicate(_FAREWELL.encode(), timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main(job: str, folder: str) -> None:
    """Runs the guard until its standard input is closed."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    *lines, last = sys.stdin.read().split("\n")
    if last == _FAREWELL:
        return
    last_seen, marks = time.monotonic(), (get_mark(job),)
    sessions = {int(leader): int(start) for leader, start in map(str.split, lines)}
    _sessions[marks[0]] = {
        leader: start for leader, start in sessions.items() if start != _SESSION_ENDED
    }
    while time.monotonic() - last_seen < _QUIET_SECS:
        if living(marks):
            last_seen = time.monotonic()
            signal_all(marks, signal.SIGKILL)
        time.sleep(_POLL_SECS)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
