"""What happens to a job, for programs: one line of JSON for each event."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from keras_distplug.core.errors import ConfigurationError


class EventLog:
    """Appends events to a file. A context manager.

    Each has `at` (seconds since 1970), `event`, `job` and `attempt`, and what belongs to it:

    - `started`: `workers`, `spares` (of those that were spares), `slots`
    - `training`: `secs` since the failure before, `after`
    - `failed`: `worker`, `cause`, `exit_code`, `what`; the first one is the cause of the others
    - `again`: `pause_secs`, `workers`
    - `ended`: `exit_code`, `why`

    Args:
        path: The file, which may be there; None keeps nothing.
        job: The job's name.
    """

    def __init__(self, path: Path | None, job: str) -> None:
        self._job = job
        self._file: int | None = None
        if path is not None:
            try:
                self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            except OSError as error:
                raise ConfigurationError(
                    f"The log {path} cannot be written: {error.strerror}. Give --log a file in a "
                    "folder that exists."
                ) from error

    def note(self, event: str, attempt: int, **what: Any) -> None:
        if self._file is None:
            return
        line = {"at": time.time(), "event": event, "job": self._job, "attempt": attempt, **what}
        try:
            os.write(self._file, json.dumps(line).encode() + b"\n")
        except OSError as error:
            print(f"keras-distplug: no more events are logged: {error}", file=sys.stderr)
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            os.close(self._file)
