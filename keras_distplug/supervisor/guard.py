"""Finds every process of a job, and ends them all when the supervisor cannot.

A job's processes are known by the job's name in their environment, and each worker's by a name of
its own, which they hand down to whatever they start: a process group or a session of its own does
not hide a process.

The guard is a small process that waits for the supervisor's farewell. When the pipe between them
closes without it, the supervisor is dead, and the guard ends the job.

Standard library only, and run as a file: it must work whatever the supervisor's `sys.path` was.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Self

_JOB = "KERAS_DISTPLUG_JOB"  # `core.supervised.JOB`, which cannot be imported here
_FAREWELL = "farewell"
_POLL_SECS = 0.02
# A worker that the supervisor was starting when it was killed has no mark until its program runs.
_QUIET_SECS = 1.0


def mark_of(job: str) -> str:
    """What all processes of a job have in their environment."""
    return f"{_JOB}={job}"


def living(marks: Collection[str]) -> bool:
    """True while a process has not ended that has one of these in its environment."""
    return next(_pids(marks), None) is not None


def end_all(marks: Collection[str], timeout_secs: float) -> None:
    """Kills every process that has one of these in its environment, and awaits their ends."""
    deadline = time.monotonic() + timeout_secs
    while living(marks) and time.monotonic() < deadline:
        signal_all(marks, signal.SIGKILL)
        time.sleep(_POLL_SECS)


def signal_all(marks: Collection[str], number: signal.Signals) -> None:
    """Sends a signal to every process that has one of these in its environment."""
    for pid in _pids(marks):
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            try:
                # Looked at again: from here on the number cannot come to mean another process.
                if _has(marks, pid):
                    signal.pidfd_send_signal(pidfd, number)
            finally:
                os.close(pidfd)


_started: set[int] = set()


def note_child(pid: int) -> None:
    """This process has started that one, and will wait for its end."""
    _started.add(pid)


def forget_child(pid: int) -> None:
    """Its end has been awaited: the number may come to mean another process."""
    _started.discard(pid)


def reap_orphans() -> None:
    """Takes the exit codes of ended processes that have become children of this one because their
    parents ended, so that the system can forget them.

    Those come from sessions of their own, as workers do. A child of this process's own session is
    another's to await: `run` may have been called by a program that has children.
    """
    session = os.getsid(0)
    for task in Path("/proc/self/task").iterdir():
        # A thread may have ended, or the kernel may not say what its children are.
        with contextlib.suppress(OSError):
            for pid in map(int, (task / "children").read_text().split()):
                if pid not in _started and os.getsid(pid) != session:
                    os.waitpid(pid, os.WNOHANG)


def _pids(marks: Collection[str]) -> Iterator[int]:
    for entry in os.listdir("/proc"):
        if entry.isdigit() and _has(marks, int(entry)):
            yield int(entry)


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
            start_new_session=True,
        )
        note_child(self._process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate(_FAREWELL.encode(), timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main(job: str, folder: str) -> None:
    """Runs the guard until its standard input closes."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    if sys.stdin.read() == _FAREWELL:
        return
    last_seen, marks = time.monotonic(), (mark_of(job),)
    while time.monotonic() - last_seen < _QUIET_SECS:
        if living(marks):
            last_seen = time.monotonic()
            signal_all(marks, signal.SIGKILL)
        time.sleep(_POLL_SECS)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
