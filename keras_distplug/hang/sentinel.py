"""A companion process that ends this process when its Python no longer runs.

C code that holds the interpreter's lock stops all Python threads of a process, including those that
watch it. As long as they run, one of them writes the time to memory that is shared with the
sentinel. When the time has not changed for too long, the sentinel sends SIGABRT: `faulthandler`
then prints the stacks of all threads, without needing the lock, and the process dies with a code
that schedulers treat as retryable.

Time during which the process is suspended (ctrl-Z, a debugger) does not count.

This module uses the standard library only and is run as a file, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import select
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

_LOOK_SECS = 0.5
_DYING_SECS = 10.0  # for a core file
_RAN, _LIMIT = 0, 1  # places in the note: when Python last ran, and the limit, both in seconds
_NOTE_BYTES = 16


class Sentinel:
    """The sentinel's handle in the watched process.

    On systems that do not support it (it requires Linux 5.3), no sentinel is started.

    Args:
        worker: The name of this process in messages.
        limit_s: The initial limit, in seconds, for the time without Python running.
    """

    def __init__(self, worker: str, limit_s: float) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._note: memoryview[float] | None = None
        # If Python is embedded in another program, `sys.executable` is that program, or empty.
        if not sys.executable or hasattr(sys, "frozen") or not Path("/proc/self/stat").exists():
            return
        try:
            os.close(os.pidfd_open(os.getpid()))
            file = os.memfd_create("keras_distplug")
        except (AttributeError, OSError):  # a system or sandbox that does not support these
            return
        if not faulthandler.is_enabled():
            faulthandler.enable(file=2)
        try:
            os.truncate(file, _NOTE_BYTES)
            self._note = memoryview(mmap.mmap(file, _NOTE_BYTES)).cast("d")
            self.say(limit_s)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(file), worker],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[file],
            )
        except OSError as error:
            warnings.warn(
                f"The process that watches {worker} for hangs could not be started: {error}. Hangs "
                "in C code that holds Python's global interpreter lock (GIL) will not be detected.",
                stacklevel=2,
            )
        finally:
            os.close(file)

    def say(self, limit_s: float) -> None:
        """Notes that Python runs, and must run again within `limit_s` seconds."""
        if self._note is not None:
            # The sentinel may look at any time. A number is stored all at once, while `struct`
            # would set both to zero first. The limit comes last: see `_read`.
            self._note[_RAN] = time.monotonic()
            self._note[_LIMIT] = limit_s

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


def main(pid: int, file: int, worker: str) -> None:
    """Runs the sentinel until the process has ended."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    note = memoryview(mmap.mmap(file, _NOTE_BYTES, access=mmap.ACCESS_READ)).cast("d")
    ran_before, quiet_s, looked = 0.0, 0.0, time.monotonic()
    while not select.select([process], [], [], _LOOK_SECS)[0]:
        now = time.monotonic()
        # A stop of the whole process group stops the sentinel, too: do not count that time.
        quiet_s, looked = quiet_s + min(now - looked, 2 * _LOOK_SECS), now
        ran, limit_s = _read(note)
        if ran != ran_before or _is_stopped(pid):
            ran_before, quiet_s = ran, 0.0
        elif quiet_s > limit_s:
            _end(process, worker, quiet_s)
            return


def _read(note: memoryview[float]) -> tuple[float, float]:
    """Returns when Python last ran, and the limit that was given then or earlier. A newer one may
    be shorter, and would make a save that has just ended look like a hang."""
    limit_s = note[_LIMIT]
    return note[_RAN], limit_s


def _end(process: int, worker: str, quiet_s: float) -> None:
    print(
        f"keras_distplug: {worker} has not run Python for {quiet_s:.1f} s: C code holds the "
        "interpreter's lock. Ending it with SIGABRT. Stacks of all threads, most recent call "
        "first:",
        file=sys.stderr,
        flush=True,
    )
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGABRT)
        if not select.select([process], [], [], _DYING_SECS)[0]:
            signal.pidfd_send_signal(process, signal.SIGKILL)


def _is_stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
