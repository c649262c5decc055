"""The step that a process has reached, in memory that outlives the process.

A log is written in a thread, every few seconds. A process that is killed has trained further than
its log says. This number is exact: it is stored in shared memory after every step.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_SESSION_BYTES = 8
_RECORD = struct.Struct(f"={_SESSION_BYTES}sq")


class StepMarker:
    """Stores the step of one attempt.

    Args:
        path: The file to replace, in a folder of the supervisor.
        session: The session of the attempt, of which eight characters are kept.
        step: The step at which the attempt starts.

    Raises:
        OSError: If the file cannot be written.
    """

    def __init__(self, path: Path, session: str, step: int) -> None:
        with open(path, "w+b") as file:
            file.write(_RECORD.pack(_shortened(session), step))
            file.flush()
            self._numbers = memoryview(mmap.mmap(file.fileno(), _RECORD.size)).cast("q")

    def store(self, step: int) -> None:
        """Stores a step. Takes less than a microsecond."""
        # All at once: `struct` would set it to zero first, and a kill may come in between.
        self._numbers[1] = step


def read(path: Path, session: str | None = None) -> int | None:
    """Returns the last step that an attempt stored; `None` if it is not known.

    Args:
        path: The file of a `StepMarker`.
        session: The session of the attempt. Defaults to `None`: that of the last one.
    """
    try:
        found, step = _RECORD.unpack(path.read_bytes())
    except (OSError, struct.error):
        return None
    return step if session is None or found == _shortened(session) else None


def _shortened(session: str) -> bytes:
    return session[:_SESSION_BYTES].encode().ljust(_SESSION_BYTES, b"\0")
