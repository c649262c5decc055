"""Where lines go: appended to a file on a disk, or uploaded to a store.

A store cannot append. So the log is divided into parts. The last one, while it grows, is
written again under a higher number, and then the file before it is deleted.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Protocol

from keras_distplug.core.operating_system import flags
from keras_distplug.storage.files import Files
from keras_distplug.storage.stores.local import LocalFiles

SUFFIX = ".jsonl"
_PART_BYTES = 2**18
_SHARE = 0.01  # of the time so far, between two uploads


class UploadPace:
    """The pause between uploads, which grows with the time since the first one.

    Args:
        least_secs: The pause at the start, in seconds.
        most_secs: The longest pause, in seconds.
    """

    def __init__(self, least_secs: float, most_secs: float) -> None:
        self._least_secs = least_secs
        self._most_secs = most_secs
        self._started_s = time.monotonic()

    @property
    def every_secs(self) -> float:
        passed_secs = time.monotonic() - self._started_s
        return min(max(self._least_secs, _SHARE * passed_secs), self._most_secs)


class Sink(Protocol):
    """A destination of lines."""

    @property
    def every_secs(self) -> float:
        """The pause between writes, in seconds."""
        ...

    def write(self, lines: bytes) -> None:
        """Writes lines. After an `OSError`, none of them counts as written."""
        ...

    def close(self) -> None: ...


class Appended:
    """Appends lines to a file on a disk."""

    every_secs = 0.0

    def __init__(self, files: LocalFiles, name: str) -> None:
        self._files = files
        self._name = name
        self._file: int | None = None
        self._bytes = 0  # of complete writes
        self._is_torn = False

    def write(self, lines: bytes) -> None:
        if self._file is None:
            path = self._files.inside(self._name)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, flags("O_WRONLY", "O_APPEND", "O_CREAT"), 0o666)
            self._bytes = os.fstat(self._file).st_size
        if self._is_torn:
            self._mend(self._file)
        self._is_torn = True
        if (taken := os.write(self._file, lines)) < len(lines):
            self._mend(self._file)
            where = self._files.where(self._name)
            raise OSError(f"{where} accepted only {taken} of {len(lines)} bytes")
        self._is_torn = False
        self._bytes += len(lines)

    def _mend(self, file: int) -> None:
        """Removes the part of a write that a full disk has accepted: all is written again. No other
        process writes to this file."""
        os.ftruncate(file, self._bytes)
        self._is_torn = False

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Uploaded:
    """Writes lines to files in a store, which cannot be appended to."""

    def __init__(self, files: Files, stem: str) -> None:
        self._files = files
        self._stem = stem
        self._pace = UploadPace(10.0, 60.0)
        self._part = b""
        self._number, self._version = 1, 0
        self._before: str | None = None

    @property
    def every_secs(self) -> float:
        return self._pace.every_secs

    def write(self, lines: bytes) -> None:
        part = self._part + lines
        self._version += 1
        name = f"{self._stem}.{self._number:04d}-{self._version:06d}{SUFFIX}"
        self._files.create(name, [part])
        before, self._before, self._part = self._before, name, part
        if len(part) >= _PART_BYTES:
            self._number, self._version, self._part, self._before = self._number + 1, 0, b"", None
        if before is not None:
            with contextlib.suppress(OSError):  # the newer one counts
                self._files.delete(before)

    def close(self) -> None:
        pass


def open_sink(files: Files, stem: str) -> Sink:
    """Returns the sink for the file `stem` in `files`."""
    if isinstance(files, LocalFiles):
        return Appended(files, f"{stem}{SUFFIX}")
    return Uploaded(files, stem)
