"""Reads the earlier attempts of a run from its log, quickly even if the log is long."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass

from keras_distplug.core import step_marker
from keras_distplug.core.event_lines import from_line
from keras_distplug.core.events import LAST_WORDS, Began, Entry, Window
from keras_distplug.core.supervised import Supervised
from keras_distplug.runlog.log_files import FOLDER, newest
from keras_distplug.storage import layout
from keras_distplug.storage.files import Files

_STEM = re.compile(r"\d{8}T\d{6}Z-(?P<worker>.+)-(?P<session>[0-9a-f]{8})")
_LAST_BYTES = 2**18  # of a file


@dataclass(frozen=True)
class Before:
    """The earlier attempts of a run.

    Args:
        attempts: The number of attempts that have left a log.
        last_step: The last step that the last of them has logged.
        has_told_all: True if `last_step` is exact. A process that was killed without a supervisor
            has trained a few more steps than its log says.
    """

    attempts: int
    last_step: int
    has_told_all: bool

    def loss(self, step: int) -> str:
        """Returns how many of its steps are lost if the next attempt starts at a checkpoint of
        this one, as a sentence; "" if there is nothing true to say."""
        lost = max(0, self.last_step - step)
        if not self.has_told_all:
            return f"the log of attempt {self.attempts} ends at step {self.last_step}" * bool(lost)
        if not lost:
            return "no steps were lost"
        steps, were = ("step", "was") if lost == 1 else ("steps", "were")
        return f"{lost} {steps} since that checkpoint {were} lost"


def find_earlier_attempts(files: Files, run: str, worker: str) -> Before | None:
    """Returns the earlier attempts when a new one starts; None without a log.

    Args:
        files: The directory.
        run: The name of the run's folder in the directory.
        worker: The name of the chief.

    Raises:
        CheckpointError: If the folder cannot be listed.
        OSError: If a file cannot be read.
    """
    folder = f"{run}/{FOLDER}"
    parts = newest(layout.names(files, folder))
    stems = {stem: match for stem, _ in parts if (match := _STEM.fullmatch(stem))}
    own = [stem for stem, match in stems.items() if match["worker"] == worker]
    if not own:
        return None
    last = max(own)
    entries: list[Entry] = []
    for part in sorted((part for stem, part in parts if stem == last), reverse=True):
        entries = [*_entries(files, f"{folder}/{parts[last, part]}"), *entries]
        steps = [entry.event.step for entry in entries if isinstance(entry.event, Window | Began)]
        if steps:
            attempts = len({match["session"] for match in stems.values()})
            if (reached := _marked(files, run, stems[last]["session"])) is not None:
                return Before(attempts, reached, True)
            return Before(attempts, max(steps), isinstance(entries[-1].event, LAST_WORDS))
    return None


def _marked(files: Files, run: str, session: str) -> int | None:
    """Returns the exact step that an attempt under this supervisor reached; `None` otherwise."""
    supervised = Supervised.from_env()
    if supervised is None:
        return None
    return step_marker.read(supervised.step_marker(files.where(run)), session)


def _entries(files: Files, path: str) -> list[Entry]:
    size = files.size(path)
    begin = max(0, size - _LAST_BYTES)
    buffer = bytearray(size - begin)
    filled = files.read_into(path, begin, memoryview(buffer)) if buffer else 0
    found = []
    for line in bytes(buffer[:filled]).splitlines():
        with contextlib.suppress(ValueError):  # the first and the last line may be incomplete
            found.append(from_line(line))
    return [entry for entry in found if entry is not None]
