"""Logs the events of a job as lines of JSON."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.event_lines import to_line
from keras_distplug.core.events import SUPERVISOR, Entry, Event

_LAST_SECS = 10.0


class Lines(Protocol):
    """A file in the folder of the run's log, next to those of the workers."""

    def append(self, line: bytes) -> None: ...

    def close(self, timeout_s: float) -> None: ...


OpenLog = Callable[[str, str, Mapping[str, Any], str, Callable[[OSError], None]], Lines]
"""Takes the directory, the folder in it, options of its store, the name of the file, and a function
to call with an error."""

Place = tuple[str, str, Mapping[str, Any]]


class EventLog:
    """Appends events to a file, and to the log of the workers' run. A context manager.

    `core/events.py` describes the lines.

    Args:
        path: File to create or append to; None for none.
        job: Name of the job.
        open_log: Function that opens a file in the log of the run. Defaults to None, no such file.

    Raises:
        ConfigurationError: If the file cannot be opened.
    """

    def __init__(self, path: Path | None, job: str, open_log: OpenLog | None = None) -> None:
        self._job = job
        self._open_log = open_log
        self._place: Callable[[], Place | None] = lambda: None
        self._waiting: list[bytes] = []
        self._run_logs: dict[tuple[str, str], Lines] = {}
        self._current_run_log: Lines | None = None
        self._file: int | None = None
        if path is not None:
            try:
                self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            except OSError as error:
                raise ConfigurationError(
                    f"The log {path} cannot be written: {error.strerror}. Give --log a file in an "
                    "existing, writable folder."
                ) from error

    def ask(self, place: Callable[[], Place | None]) -> None:
        """Sets the function that returns the location of the workers' log, once it is known."""
        self._place = place

    def note(self, event: Event, attempt: int, at: float | None = None) -> None:
        """Appends an event.

        Args:
            event: The event.
            attempt: Number of the attempt.
            at: Time of the event, in seconds since 1970. Defaults to now.
        """
        at = time.time() if at is None else at
        line = to_line(Entry(at, SUPERVISOR, event, self._job, attempt))
        self._log_to_run(line)
        if self._file is None:
            return
        try:
            os.write(self._file, line)
        except OSError as error:
            print(f"keras-distplug: events are no longer logged: {error}", file=sys.stderr)
            self._file = None

    def _log_to_run(self, line: bytes) -> None:
        if self._open_log is None:
            return
        self._waiting.append(line)
        if (place := self._place()) is not None:  # otherwise the location has not changed
            key = place[:2]
            try:
                # A job may train several runs, and return to an earlier one.
                if key not in self._run_logs:
                    stem = f"{SUPERVISOR}-{self._job}"
                    self._run_logs[key] = self._open_log(*place, stem, _warn)
                self._current_run_log = self._run_logs[key]
            except ConfigurationError as error:
                _warn(error)
                self._open_log = None
        if self._current_run_log is not None:
            for each in self._waiting:
                self._current_run_log.append(each)
            self._waiting.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._run_logs.values():
            each.close(_LAST_SECS)
        if self._file is not None:
            os.close(self._file)


def _warn(error: Exception) -> None:
    message = f"events cannot be written to the log of the run: {error}"
    print(f"keras-distplug: {message}", file=sys.stderr)
