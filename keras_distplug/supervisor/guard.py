"""Finds every process of a job, and ends them all when the supervisor cannot.

A job's processes are known by the job's name in their environment, and each worker's by a name of
its own, which they hand down to whatever they start: a process group or a session of its own does
not hide a process. Neither does a process hide by changing its title, which overwrites what the
kernel shows of its environment, or by clearing its environment: known are also the workers'
sessions, what those in them have started, and, where this process is a "subreaper", what has
become its child because its parent has ended.

The guard is a small process that waits for the supervisor's farewell. When the pipe between them
closes without it, the supervisor is dead, and the guard ends the job.

Standard library only, and run as a file: it must work whatever the supervisor's `sys.path` was.
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
_OVER = -2  # instead of when the leader of a session has started
_SET_CHILD_SUBREAPER = 36  # prctl(2)
_POLL_SECS = 0.02
# A worker that the supervisor was starting when it was killed has no mark until its program runs.
_QUIET_SECS = 1.0


def mark_of(job: str) -> str:
    """What all processes of a job have in their environment."""
    return f"{_JOB}={job}"


def living(marks: Collection[str], *, adopted: bool = False) -> bool:
    """True while a process has not ended that has one of these in its environment, or belongs to
    what does.

    Args:
        marks: What they have in their environment.
        adopted: Whether orphans belong to these, within `adopting_orphans`.
    """
    return bool(_pids(marks, adopted=adopted))


def end_all(marks: Collection[str], timeout_secs: float) -> None:
    """Kills every process of `living`, and awaits their ends."""
    deadline = time.monotonic() + timeout_secs
    while living(marks) and time.monotonic() < deadline:
        signal_all(marks, signal.SIGKILL)
        time.sleep(_POLL_SECS)


def signal_all(marks: Collection[str], number: signal.Signals, *, adopted: bool = False) -> None:
    """Sends a signal to every process of `living`."""
    for pid, start in _pids(marks, adopted=adopted).items():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            pidfd = os.pidfd_open(pid)
            try:
                # Looked at again: from here on the number cannot come to mean another process.
                found = _look_at(pid)
                if found is not None and found.start == start:
                    signal.pidfd_send_signal(pidfd, number)
            finally:
                os.close(pidfd)


_started: set[int] = set()
_sessions: dict[str, dict[int, int]] = {}  # by marks: their leaders, and when these have started
_adopted: dict[int, int] = {}  # the same of orphans
_guards: list[Guard] = []
_here_before: set[int] = set()  # sessions of children that this process already had
_adopts = threading.Event()


def become_subreaper() -> None:
    """Makes descendants whose parent ends children of this process, which can then await them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Within this, descendants whose parent has ended, and that are in a session of their own,
    belong to the workers: this process starts nothing else."""
    with contextlib.suppress(OSError, AttributeError):  # the system does not permit, or know, it
        become_subreaper()
        # The first process of a container gets the orphans of all others, too.
        if os.getpid() != 1:
            _here_before.update(os.getsid(pid) for pid in _children())
            _adopts.set()
    try:
        yield
    finally:
        _adopts.clear()
        _adopted.clear()
        _here_before.clear()


def note_child(pid: int) -> None:
    """This process has started that one, and will wait for its end."""
    _started.add(pid)


def note_worker(pid: int, mark: str) -> None:
    """As `note_child`, for a worker, which leads a session of its own."""
    note_child(pid)
    _note_session(pid, _sessions.setdefault(mark, {}))


def _note_session(leader: int, sessions: dict[int, int]) -> None:
    if leader in sessions:
        return
    found = _look_at(leader)
    sessions[leader] = -1 if found is None else found.start  # its leader may have ended
    for each in _guards:
        each.tell(leader, sessions[leader])


def forget_child(pid: int) -> None:
    """Its end has been awaited: the number may come to mean another process."""
    _started.discard(pid)


def reap_orphans() -> None:
    """Takes the exit codes of ended processes that have become children of this one because their
    parents ended, so that the system can forget them.

    Those come from sessions of their own, as workers do. A child of this process's own session is
    another's to await: `run` may have been called by a program that has children.
    """
    ours = os.getsid(0)
    for pid in _children():
        with contextlib.suppress(OSError):
            session = os.getsid(pid)
            is_orphan = pid not in _started and session != ours
            is_alive = is_orphan and os.waitpid(pid, os.WNOHANG) == (0, 0)
            if is_alive and _adopts.is_set() and session not in _here_before:
                _note_session(session, _adopted)


def _children() -> list[int]:
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        # A thread may have ended, or the kernel may not say what its children are.
        with contextlib.suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


@dataclass(frozen=True)
class _Found:
    """What the kernel says of a process."""

    is_running: bool
    parent: int
    session: int
    start: int  # in ticks


def _look_at(pid: int) -> _Found | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None  # ended
    fields = stat.rpartition(b")")[2].split()
    return _Found(fields[0] not in b"ZX", int(fields[1]), int(fields[3]), int(fields[19]))


def _pids(marks: Collection[str], *, adopted: bool = False) -> dict[int, int]:
    """The processes, and when they have started."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    table = {pid: found for pid in pids if (found := _look_at(pid)) is not None}
    noted = [_sessions.get(mark, {}) for mark in marks]
    sessions = {
        leader
        for each in [*noted, *([_adopted] if adopted else [])]
        for leader, start in each.items()
        # The number of a session that is over may have come to mean another one.
        if leader not in table or table[leader].start == start
    }
    children: dict[int, list[int]] = {}
    for pid, found in table.items():
        children.setdefault(found.parent, []).append(pid)
    belonging = {
        pid for pid, found in table.items() if found.session in sessions or _has(marks, pid)
    }
    left = list(belonging)
    while left:
        started = [pid for pid in children.get(left.pop(), ()) if pid not in belonging]
        belonging.update(started)
        left += started
    for each in [*noted, *([_adopted] if adopted else [])]:
        for leader in each.keys() - {found.session for found in table.values()}:
            del each[leader]  # it is over, and its number may come to mean another one
            for guard in _guards:
                guard.tell(leader, _OVER)
    return {
        pid: table[pid].start for pid in belonging if table[pid].is_running and _may_signal(pid)
    }


def _may_signal(pid: int) -> bool:
    """False for another user's, such as what a worker has started with sudo."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return False
    except OSError:
        return True  # it has ended
    return True


def _has(marks: Collection[str], pid: int) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False  # ended, or another user's
    # A zombie has none.
    return not {mark.encode() for mark in marks}.isdisjoint(environ.split(b"\0"))


class Guard:
    """The supervisor's end of the guard. A context manager: leaving it is the farewell.

    Args:
        job: The job that ends with the supervisor.
        folder: The job's folder, deleted with it.
    """

    def __init__(self, job: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, job, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,  # what cannot be told is not told later, either
            start_new_session=True,
        )
        note_child(self._process.pid)

    def tell(self, leader: int, start: int) -> None:
        """Of a session of the job."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone
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
    """Runs the guard until its standard input closes."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    *lines, last = sys.stdin.read().split("\n")
    if last == _FAREWELL:
        return
    last_seen, marks = time.monotonic(), (mark_of(job),)
    told = {int(leader): int(start) for leader, start in map(str.split, lines)}
    _sessions[marks[0]] = {leader: start for leader, start in told.items() if start != _OVER}
    while time.monotonic() - last_seen < _QUIET_SECS:
        if living(marks):
            last_seen = time.monotonic()
            signal_all(marks, signal.SIGKILL)
        time.sleep(_POLL_SECS)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
