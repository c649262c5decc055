"""A process beside this one that ends it when its Python no longer runs.

Code in C that keeps the interpreter's lock stops all Python threads of a process, those that watch
it among them. As long as they run, one of them notes the time in memory that the sentinel sees,
too. When that has not changed for too long, it sends SIGABRT: `faulthandler` then prints the stacks
of all threads, without the lock, and the process dies with a code that schedulers take as worth
another try.

A process that somebody has stopped (ctrl-Z, a debugger) is waited for.

Standard library only, and run as a file: it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import time
import warnings
from pathlib import Path

_LOOK_SECS = 0.5
_DYING_SECS = 10.0  # for a core file
_NOTE = struct.Struct("dd")  # when Python ran last, and how long it may not


class Sentinel:
    """The watched process' end of it.

    Where the system has none (it takes Linux 5.3), there is no sentinel, and nothing else changes.

    Args:
        worker: How this process is called in what is printed.
        limit_s: How long from now Python may not run.
    """

    def __init__(self, worker: str, limit_s: float) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._note: mmap.mmap | None = None
        # Where Python is part of another program, its name starts that one, or nothing.
        if not sys.executable or hasattr(sys, "frozen") or not Path("/proc/self/stat").exists():
            return
        try:
            os.close(os.pidfd_open(os.getpid()))
            file = os.memfd_create("keras_distplug")
        except (AttributeError, OSError):  # a system, or a sandbox, without these
            return
        if not faulthandler.is_enabled():
            faulthandler.enable(file=2)
        try:
            os.truncate(file, _NOTE.size)
            self._note = mmap.mmap(file, _NOTE.size)
            self.say(limit_s)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(file), worker],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[file],
            )
        except OSError as error:
            warnings.warn(f"No sentinel looks after {worker}: {error}", stacklevel=2)
        finally:
            os.close(file)

    def say(self, limit_s: float) -> None:
        """Python runs, and has to again within `limit_s`."""
        if self._note is not None:
            _NOTE.pack_into(self._note, 0, time.monotonic(), limit_s)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


def main(pid: int, file: int, worker: str) -> None:
    """Runs the sentinel until the process is gone."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    note = mmap.mmap(file, _NOTE.size, access=mmap.ACCESS_READ)
    ran_before, quiet_s, looked = 0.0, 0.0, time.monotonic()
    while not select.select([process], [], [], _LOOK_SECS)[0]:
        now = time.monotonic()
        # Whoever stops this process' group stops the sentinel, too.
        quiet_s, looked = quiet_s + min(now - looked, 2 * _LOOK_SECS), now
        ran, limit_s = _NOTE.unpack_from(note)
        if ran != ran_before or _is_stopped(pid):
            ran_before, quiet_s = ran, 0.0
        elif quiet_s > limit_s:
            _end(process, worker, quiet_s)
            return


def _end(process: int, worker: str, quiet_s: float) -> None:
    print(
        f"keras_distplug: {worker} has run no Python for {quiet_s:.1f} s, so that code in C keeps "
        "the interpreter's lock. It is ended by SIGABRT; where it was, each thread's last call "
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
