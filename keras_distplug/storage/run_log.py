"""The log of a run: files of lines, one for each worker and `fit`, and one for each supervisor.

    <directory>/run-0001/log/
      20261122T101112Z-worker-0-3f0c9a1b.jsonl                a worker's, on a disk
      20261122T101112Z-worker-1-3f0c9a1b.0002-000017.jsonl    in a store: the second part
      supervisor-8d1e....jsonl

A store has no appending. So what is written is divided into parts, of which the last one, while it
grows, is written anew under a higher number, and then the file before it is deleted.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from keras_distplug.core.events import Began, Entry, from_line
from keras_distplug.core.goodput import Fit
from keras_distplug.core.threads import before_threads_end
from keras_distplug.storage import layout
from keras_distplug.storage.files import Files, LocalFiles, open_files

FOLDER = "log"
SUPERVISOR = "supervisor-"
_SUFFIX = ".jsonl"
_VERSION = re.compile(r"(?P<stem>.+)\.(?P<part>\d{4,})-(?P<version>\d{6,})")
_PART_BYTES = 2**18
_KEPT_BYTES = 2**20  # of what cannot be written
_AGAIN_SECS = 5.0  # after a failure
_EVERY_SECS, _LONGEST_SECS, _SHARE = 10.0, 60.0, 0.01  # of uploads
_LAST_SECS = 10.0


class Sink(Protocol):
    """Where lines go."""

    @property
    def every_secs(self) -> float:
        """Pause between writes."""
        ...

    def write(self, lines: bytes) -> None:
        """Raises OSError, and has written nothing then that counts."""
        ...

    def close(self) -> None: ...


class _Appended:
    """A file on a disk."""

    every_secs = 0.0

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._is_torn = False

    def write(self, lines: bytes) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        # A full disk may have taken a part of a line.
        given = b"\n" * self._is_torn + lines
        self._is_torn = True
        if os.write(self._file, given) < len(given):
            raise OSError(f"{self._path} took a part of it only")
        self._is_torn = False

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class _Uploaded:
    """Files in a store."""

    def __init__(self, files: Files, stem: str) -> None:
        self._files = files
        self._stem = stem
        self._begun_s = time.monotonic()
        self._part = b""
        self._number, self._version = 1, 0
        self._before: str | None = None

    @property
    def every_secs(self) -> float:
        return min(max(_EVERY_SECS, _SHARE * (time.monotonic() - self._begun_s)), _LONGEST_SECS)

    def write(self, lines: bytes) -> None:
        part = self._part + lines
        self._version += 1
        name = f"{self._stem}.{self._number:04d}-{self._version:06d}{_SUFFIX}"
        self._files.create(name, [part])
        before, self._before, self._part = self._before, name, part
        if len(part) >= _PART_BYTES:
            self._number, self._version, self._part, self._before = self._number + 1, 0, b"", None
        if before is not None:
            with contextlib.suppress(OSError):  # it does not count any more
                self._files.delete(before)

    def close(self) -> None:
        pass


def sink_for(files: Files, stem: str) -> Sink:
    """Where the file `stem` goes, from the folder of `files`."""
    if isinstance(files, LocalFiles):
        return _Appended(Path(files.where(f"{stem}{_SUFFIX}")))
    return _Uploaded(files, stem)


class Log:
    """Writes lines in a thread, so that whoever has something to tell waits for no storage.

    What cannot be written is tried again, and told once. When the process ends, it waits for the
    last lines, but not for ever.

    Args:
        sink: Where they go.
        on_failure: Called, from the thread, with what keeps lines from being written; once, until
            some are written again.
    """

    def __init__(self, sink: Sink, on_failure: Callable[[OSError], None]) -> None:
        self._sink = sink
        self._on_failure = on_failure
        self._waiting: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._is_hurried = self._is_closed = self._is_writing = False
        self._thread = threading.Thread(target=self._run, name="keras_distplug-log", daemon=True)
        self._thread.start()
        _close_at_exit()
        _logs.add(self)

    def append(self, line: bytes) -> None:
        """From any thread."""
        with self._changed:
            self._waiting.append(line)
            while sum(map(len, self._waiting)) > _KEPT_BYTES:
                self._waiting.popleft()
            self._changed.notify_all()

    def flush(self, timeout_s: float = _LAST_SECS) -> bool:
        """Whether all is written, for which it waits so long."""
        with self._changed:
            self._is_hurried = True
            self._changed.notify_all()
            done = self._changed.wait_for(
                lambda: not self._waiting and not self._is_writing, timeout_s
            )
            self._is_hurried = False
        return done

    def close(self, timeout_s: float = _LAST_SECS) -> None:
        """As `flush`; nothing more is written then."""
        with self._changed:
            self._is_hurried = self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    # How, in the thread

    def _run(self) -> None:
        has_failed, pause_s = False, 0.0
        while (lines := self._next(pause_s)) is not None:
            try:
                self._sink.write(lines)
                has_failed, pause_s = False, self._sink.every_secs
            except OSError as error:
                if not has_failed:
                    self._on_failure(error)
                has_failed, pause_s = True, _AGAIN_SECS
                with self._changed:
                    if self._is_closed:
                        break
                    self._waiting.appendleft(lines)
            finally:
                with self._changed:
                    self._is_writing = False
                    self._changed.notify_all()
        self._sink.close()

    def _next(self, pause_s: float) -> bytes | None:
        """What waits to be written, once there is some; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_hurried, pause_s)
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if not self._waiting:
                return None
            lines = b"".join(self._waiting)
            self._waiting.clear()
            self._is_writing = True
        return lines


def open_beside(
    url: str,
    folder: str,
    storage_options: Mapping[str, Any],
    stem: str,
    on_failure: Callable[[OSError], None],
) -> Log:
    """Opens a file beside others.

    Args:
        url: The directory of a run.
        folder: That of its log, in there.
        storage_options: For `url`.
        stem: The name of the file, without its end.
        on_failure: As in `Log`.

    Raises:
        ConfigurationError: If `url` cannot be used here.
    """
    files = open_files(url, storage_options)
    return Log(sink_for(files, f"{folder}/{stem}"), on_failure)


_logs: weakref.WeakSet[Log] = weakref.WeakSet()


@functools.cache
def _close_at_exit() -> None:
    before_threads_end(_close_all)


def _close_all() -> None:
    for log in list(_logs):
        log.close()


def read(files: Files, run: str) -> tuple[list[Fit], list[Entry]]:
    """What the workers of a run have told, and what supervisors have, in the order of time.

    Raises:
        CheckpointError: If the folder cannot be listed.
        OSError: If a file cannot be read.
    """
    folder = f"{run}/{FOLDER}" if run else FOLDER
    texts: dict[str, list[bytes]] = {}
    for stem, name in sorted(newest(layout.names(files, folder)).items()):
        with contextlib.suppress(FileNotFoundError):  # a newer one has just taken its place
            texts.setdefault(stem[0], []).append(files.read(f"{folder}/{name}"))
    fits, supervised = [], []
    for stem_, parts in texts.items():
        entries = [entry for line in b"".join(parts).splitlines() if (entry := from_line(line))]
        if stem_.startswith(SUPERVISOR):
            supervised += entries
        elif entries and isinstance(began := entries[0].event, Began):
            fits.append(Fit(began, tuple(entries)))
    return (
        sorted(fits, key=lambda fit: fit.begins_at),
        sorted(supervised, key=lambda entry: entry.at),
    )


def newest(names: list[str]) -> dict[tuple[str, int], str]:
    """Of each part of each file, the one that counts."""
    found: dict[tuple[str, int], tuple[int, str]] = {}
    for name in names:
        if not name.endswith(_SUFFIX):
            continue
        stem, part, version = name.removesuffix(_SUFFIX), 0, 0
        if match := _VERSION.fullmatch(stem):
            stem, part, version = match["stem"], int(match["part"]), int(match["version"])
        found[stem, part] = max(found.get((stem, part), (-1, "")), (version, name))
    return {key: name for key, (_, name) in found.items()}
