"""Kills what a killed supervisor leaves behind.

The guard is a small process that holds the read end of a pipe. The supervisor writes down every
process group that it starts and every one that has ended. When the pipe closes without a farewell,
the supervisor is dead, and the guard kills the groups that are left.

Standard library only, and run as a file: it must work whatever the supervisor's `sys.path` was.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Self

_FAREWELL = "farewell"


def groups_left(messages: Iterable[str]) -> set[int]:
    """The process groups to kill once `messages` have come to their end.

    A group that was reported as ended is left alone: its number may belong to somebody else by now.
    """
    groups: set[int] = set()
    for message in messages:
        if not message.endswith("\n"):
            break  # the supervisor died while it wrote this
        word, _, number = message.strip().partition(" ")
        if word == _FAREWELL:
            return set()
        if word == "started":
            groups.add(int(number))
        else:
            groups.discard(int(number))
    return groups


def main() -> None:
    """Runs the guard until its standard input closes."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    for group in groups_left(sys.stdin):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


class Guard:
    """The supervisor's end of the guard. A context manager: leaving it is the farewell.

    Between the start of a worker and `started` lie a few microseconds in which a SIGKILL to the
    supervisor would leave that worker behind.
    """

    def __init__(self) -> None:
        self._lost = False
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
            encoding="ascii",
        )

    def started(self, group: int) -> None:
        """From now on `group` dies with the supervisor."""
        self._tell(f"started {group}\n")

    def ended(self, group: int) -> None:
        """Call before the leader of `group` is reaped: from then on the number may be reused."""
        self._tell(f"ended {group}\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tell(f"{_FAREWELL}\n")
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, message: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(message)
            self._process.stdin.flush()
        except BrokenPipeError:
            # A guard that somebody killed is no reason to end a training that runs.
            if not self._lost:
                print(
                    "keras-distplug: the guard process is gone; if this supervisor is killed, its "
                    "workers will stay behind",
                    file=sys.stderr,
                )
            self._lost = True


if __name__ == "__main__":
    main()
