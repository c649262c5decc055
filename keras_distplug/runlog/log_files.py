"""The log of a run: one file of lines per worker and `fit`, and one per supervisor.

    <directory>/run-0001/log/
      20261122T101112Z-worker-0-3f0c9a1b.jsonl                a worker's, on a disk
      20261122T101112Z-worker-1-3f0c9a1b.0002-000017.jsonl    in a store: the second part
      supervisor-8d1e....jsonl

`sinks` writes them.
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from keras_distplug.core.errors import CheckpointError, NoCheckpointError
from keras_distplug.core.event_lines import from_line
from keras_distplug.core.events import SUPERVISOR, Beat, Began, Entry
from keras_distplug.core.threads import call_before_threads_end
from keras_distplug.runlog.goodput_totals import Fit
from keras_distplug.runlog.sinks import SUFFIX, Sink, open_sink
from keras_distplug.storage import layout
from keras_distplug.storage.files import Files, open_files

FOLDER = "log"
_VERSION = re.compile(r"(?P<stem>.+)\.(?P<part>\d{4,})-(?P<version>\d{6,})")
_KEPT_BYTES = 2**20  # of lines that cannot be written
_AGAIN_SECS = 5.0  # before a failed write is retried
_NO_FILE = (errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.EFBIG)
_MOST_BYTES, _AT_ONCE_BYTES = 2**30, 2**23  # of a file
_LEAST_AGAIN_SECS = 0.1  # between retries, also while `flush` waits
_LAST_SECS = 10.0
_BEAT_SECS = 5.0  # without a line
_BEAT = b'"event":"beat"'  # JSON text in a string has other quotes
_LOOKS = 5  # attempts to find the newer version of a file that was replaced
_LEVELS = 3  # of folders in which runs are looked for


@dataclass(frozen=True)
class _Line:
    text: bytes
    is_minor: bool
    is_first: bool


class Log:
    """Writes lines in a thread, so that callers do not wait for storage.

    Lines that cannot be written are retried, and the failure is reported once. If too many lines
    are waiting, minor ones are dropped first, the oldest before newer ones; the first line of the
    log is never dropped. At exit, the process waits for the last lines for a limited time.

    Args:
        sink: The destination of the lines.
        on_failure: Called from the thread with the error; once, until lines are written again.
        lost: Returns the line that says how many lines were lost, which precedes the kept ones.
        beat: Returns a heartbeat, which is written after five seconds without another line, or
            None.
    """

    def __init__(
        self,
        sink: Sink,
        on_failure: Callable[[OSError], None],
        lost: Callable[[int], bytes | None] = lambda lines: None,
        beat: Callable[[], bytes | None] = lambda: None,
    ) -> None:
        self._sink = sink
        self._on_failure = on_failure
        self._lost = lost
        self._beat = beat
        self._waiting: deque[_Line] = deque()
        self._waiting_bytes = 0
        self._has_first = False
        self._dropped = 0  # not reported yet
        self._changed = threading.Condition()
        self._is_hurried = self._is_closed = self._is_writing = False
        self._thread = threading.Thread(target=self._run, name="keras_distplug-log", daemon=True)
        self._thread.start()
        _close_at_exit()
        _logs.add(self)

    def append(self, line: bytes, *, is_minor: bool = False) -> None:
        """Adds a line; may be called from any thread.

        Args:
            line: The line, with its line break.
            is_minor: Whether it may be dropped before other lines. Defaults to `False`.
        """
        with self._changed:
            self._waiting.append(_Line(line, is_minor, is_first=not self._has_first))
            self._has_first = True
            self._waiting_bytes += len(line)
            self._drop_some()
            self._changed.notify_all()

    def flush(self, timeout_s: float = _LAST_SECS) -> bool:
        """Waits until all lines are written, at most `timeout_s`. Returns False if some are not."""
        with self._changed:
            self._is_hurried = True
            self._changed.notify_all()
            done = self._changed.wait_for(
                lambda: not self._waiting and not self._is_writing, timeout_s
            )
            self._is_hurried = False
        return done

    def close(self, timeout_s: float = _LAST_SECS) -> None:
        """Waits like `flush`, and ends the log."""
        with self._changed:
            self._is_hurried = self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    # How, in the thread

    def _run(self) -> None:
        has_failed, pause_s = False, 0.0
        while (taken := self._next(pause_s)) is not None:
            lines, dropped = taken
            told = [line] if dropped and (line := self._lost(dropped)) is not None else []
            texts = [each.text for each in lines]
            # The first line of the log stays first.
            place = 1 if lines[0].is_first else 0
            try:
                self._sink.write(b"".join([*texts[:place], *told, *texts[place:]]))
                has_failed, pause_s = False, self._sink.every_secs
            except OSError as error:
                if not has_failed:
                    self._on_failure(error)
                has_failed, pause_s = True, _AGAIN_SECS
                with self._changed:
                    if self._is_closed:
                        break
                    self._waiting.extendleft(reversed(lines))
                    self._waiting_bytes += sum(len(each.text) for each in lines)
                    self._dropped += dropped
                    self._drop_some()
                    # Also while `flush` waits: retrying without a pause would not help.
                    self._changed.wait_for(lambda: self._is_closed, _LEAST_AGAIN_SECS)
            finally:
                with self._changed:
                    self._is_writing = False
                    self._changed.notify_all()
        self._sink.close()

    def _drop_some(self) -> None:
        """Drops more lines than necessary, so that not every new line drops some."""
        if self._waiting_bytes <= _KEPT_BYTES:
            return
        for is_minor in (True, False):
            kept: deque[_Line] = deque()
            for line in self._waiting:
                may_go = line.is_minor is is_minor and not line.is_first
                if may_go and self._waiting_bytes > 0.75 * _KEPT_BYTES:
                    self._waiting_bytes -= len(line.text)
                    self._dropped += 1
                else:
                    kept.append(line)
            self._waiting = kept
            if self._waiting_bytes <= _KEPT_BYTES:
                return

    def _next(self, pause_s: float) -> tuple[list[_Line], int] | None:
        """Waits for lines, and returns them with the number of lost ones; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_hurried, pause_s)
            while not self._changed.wait_for(lambda: self._waiting or self._is_closed, _BEAT_SECS):
                if self._has_first and (line := self._beat()) is not None:
                    self._waiting.append(_Line(line, is_minor=True, is_first=False))
                    self._waiting_bytes += len(line)
            if not self._waiting:
                return None
            taken = list(self._waiting), self._dropped
            self._waiting.clear()
            self._waiting_bytes = self._dropped = 0
            self._is_writing = True
        return taken


def open_beside(
    url: str,
    folder: str,
    storage_options: Mapping[str, Any],
    stem: str,
    on_failure: Callable[[OSError], None],
) -> Log:
    """Opens a file next to the other files of a log.

    Args:
        url: The directory of the run.
        folder: The folder of its log in the directory.
        storage_options: The storage options for `url`.
        stem: The name of the file, without its suffix.
        on_failure: Passed to `Log`.

    Raises:
        ConfigurationError: If `url` cannot be used here.
    """
    files = open_files(url, storage_options)
    return Log(open_sink(files, f"{folder}/{stem}"), on_failure)


_logs: weakref.WeakSet[Log] = weakref.WeakSet()


@functools.cache
def _close_at_exit() -> None:
    call_before_threads_end(_close_all)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_logs.clear)  # the child does not have their threads


def _close_all() -> None:
    for log in list(_logs):
        log.close()


def runs(files: Files, only: str | None = None) -> list[str]:
    """Returns the names of runs that have a log, oldest first; `""` for a log in the directory
    itself.

    Args:
        files: The directory.
        only: The name of the only run to return. Defaults to `None`: all runs.

    Raises:
        NoCheckpointError: If the run has no log.
        CheckpointError: If the directory cannot be listed.
    """
    names = ["", *(name for _, name in layout.runs(files))]
    found = [name for name in names if FOLDER in layout.names(files, name)]
    found = [name for name in found if only is None or name == only]
    if not found:
        raise NoCheckpointError(
            f"There is no log in {files.where(only or '')}. A run has one, from the start of its "
            "first epoch, if RunLog is among its callbacks; `keras_distplug.defaults()` includes "
            "it. Pass the directory that training was given, or the `log_dir` of RunLog."
        )
    return found


def find(
    url: str, on_failure: Callable[[str, CheckpointError], None]
) -> Iterator[tuple[Files, str]]:
    """Yields the folders of all runs that have a log, in a folder and some levels below it.

    Args:
        url: The folder.
        on_failure: Called with every folder that cannot be listed, and the error. Its contents are
            skipped.

    Raises:
        ConfigurationError: If `url` names no folder.
    """
    files = open_files(url)
    yield from ((files, folder) for folder in _with_log(files, "", _LEVELS, on_failure, set()))


def _with_log(
    files: Files,
    folder: str,
    levels: int,
    on_failure: Callable[[str, CheckpointError], None],
    seen: set[str],
) -> Iterator[str]:
    # Links may lead to the same folder several times, or form a loop.
    real = os.path.realpath(files.where(folder)) if files.traits.is_near else folder
    if real in seen:
        return
    seen.add(real)
    path = f"{folder}/" if folder else ""
    try:
        names = layout.names(files, folder)
        has_log = FOLDER in names and bool(newest(layout.names(files, f"{path}{FOLDER}")))
    except CheckpointError as error:
        on_failure(folder, error)
        return
    if has_log:
        yield folder
    if levels and layout.RECORD not in names:  # a run's other folders are checkpoints
        for name in names:
            if name != FOLDER and not name.startswith("."):
                yield from _with_log(files, f"{path}{name}", levels - 1, on_failure, seen)


class Reader:
    """Reads the log of one run repeatedly, every time only the new lines.

    Args:
        files: The directory.
        run: The name of the run's folder in it.
        on_skipped: Called with a message about lines, and entries that are not regular files, that
            are skipped. Defaults to `None`: lines are skipped silently, and `read` raises the error
            of an entry.
    """

    def __init__(
        self, files: Files, run: str, on_skipped: Callable[[str], None] | None = None
    ) -> None:
        self._files = files
        self._on_skipped = on_skipped
        self._folder = f"{run}/{FOLDER}" if run else FOLDER
        self._known: dict[tuple[str, int], _File] = {}
        self._told: dict[tuple[str, int], str] = {}  # of lines that are skipped
        self._fits: dict[str, Fit] = {}
        self._reading = threading.Lock()

    def read(self) -> tuple[list[Fit], list[Entry]]:
        """Returns the fits of all workers and the supervisors' events, in the order of time.

        Raises:
            CheckpointError: If the folder cannot be listed.
            OSError: If a file cannot be read.
        """
        with self._reading:
            return self._read()

    def _read(self) -> tuple[list[Fit], list[Entry]]:
        changed: set[str] = set()
        for _ in range(_LOOKS):
            keys, is_whole = self._read_files(changed)
            if is_whole:
                break
        stems: dict[str, list[_File]] = {}
        for key in keys:
            if (known := self._known.get(key)) is not None:
                stems.setdefault(key[0], []).append(known)
        supervised = []
        for stem, parts in stems.items():
            if stem.startswith(f"{SUPERVISOR}-"):
                supervised += [entry for part in parts for entry in part.entries]
            elif stem in changed:
                entries = tuple(entry for part in parts for entry in part.entries)
                if entries and isinstance(began := entries[0].event, Began):
                    self._fits[stem] = Fit(began, entries)
        fits = [self._fits[stem] for stem in stems if stem in self._fits]
        return (
            sorted(fits, key=lambda fit: fit.begins_at),
            sorted(supervised, key=lambda entry: entry.at),
        )

    def _read_files(self, changed: set[str]) -> tuple[list[tuple[str, int]], bool]:
        """Reads all files. Returns which exist, and False if one was replaced meanwhile."""
        listed, is_whole = sorted(newest(layout.names(self._files, self._folder)).items()), True
        for key, name in listed:
            file = self._known.get(key)
            if file is None or file.name != name:
                file = _File(name)
            try:
                if file.read_on(self._files, path := f"{self._folder}/{name}"):
                    changed.add(key[0])
                skipped = file.take_skipped()
                # In a store, every new version of a part repeats the lines of the previous one.
                if self._on_skipped is not None and skipped and self._told.get(key) != skipped:
                    self._told[key] = skipped
                    self._on_skipped(f"{self._files.where(path)}, {skipped}")
            except FileNotFoundError:  # a newer version has just replaced it
                is_whole = False
            except OSError as error:
                if self._on_skipped is None or error.errno not in _NO_FILE:
                    raise
                where = self._files.where(f"{self._folder}/{name}")
                self._on_skipped(f"{where} is skipped: {error.strerror}")
            else:
                self._known[key] = file
        return [key for key, _ in listed], is_whole


class _File:
    """A file that may grow, and its entries so far."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.entries: list[Entry] = []
        self._read_bytes = self._lines = self._skipped = 0
        self._first_skipped = ""

    def read_on(self, files: Files, path: str) -> bool:
        """Reads new lines. Returns False without new lines."""
        if self._read_bytes and _VERSION.fullmatch(self.name.removesuffix(SUFFIX)):
            return False  # in a store, files do not grow: new versions have new names
        size = files.size(path)
        if size - self._read_bytes > _MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has {size} bytes", path)
        has_new = False
        while self._read_bytes < size:
            buffer = bytearray(min(size - self._read_bytes, _AT_ONCE_BYTES))
            filled = files.read_into(path, self._read_bytes, memoryview(buffer))
            # The last line may be incomplete, but no line is that long.
            whole = buffer.rfind(b"\n", 0, filled) + 1
            if not whole and filled == _AT_ONCE_BYTES:
                whole = filled
            if not whole:
                break
            self._read_bytes += whole
            lines = bytes(buffer[:whole]).removesuffix(b"\n").split(b"\n")
            for line, following in itertools.zip_longest(lines, lines[1:], fillvalue=b""):
                if _BEAT in line and _BEAT in following:
                    self._lines += 1  # of consecutive ones, the last says it all
                else:
                    self._take(line)
            has_new = True
        return has_new

    def _take(self, line: bytes) -> None:
        self._lines += 1
        if not line.strip():
            return
        try:
            entry = from_line(line)
        except ValueError as error:
            if not self._skipped:
                self._first_skipped = f"line {self._lines} is skipped: {error}"
            self._skipped += 1
        else:
            if entry is None:
                return
            last = self.entries[-1].event if self.entries else None
            if isinstance(last, Beat) and isinstance(entry.event, Beat):
                self.entries.pop()
            self.entries.append(entry)

    def take_skipped(self) -> str:
        """Describes the lines that were skipped since the last call, or returns an empty string."""
        others, self._skipped = self._skipped - 1, 0
        if others < 0:
            return ""
        return f"{self._first_skipped}; {others} more" if others else self._first_skipped


def read(
    files: Files, run: str, on_skipped: Callable[[str], None] | None = None
) -> tuple[list[Fit], list[Entry]]:
    """Reads the log once, as `Reader` does."""
    return Reader(files, run, on_skipped).read()


def newest(names: list[str]) -> dict[tuple[str, int], str]:
    """Returns the newest version of every part of every file."""
    found: dict[tuple[str, int], tuple[int, str]] = {}
    for name in names:
        if not name.endswith(SUFFIX):
            continue
        stem, part, version = name.removesuffix(SUFFIX), 0, 0
        if match := _VERSION.fullmatch(stem):
            stem, part, version = match["stem"], int(match["part"]), int(match["version"])
        found[stem, part] = max(found.get((stem, part), (-1, "")), (version, name))
    return {key: name for key, (_, name) in found.items()}
