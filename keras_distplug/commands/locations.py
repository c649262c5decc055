"""Resolves a path or URL to a training job, one of its runs, a checkpoint or a log.

Every path that this package prints can be given to every command.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from keras_distplug.core.errors import CheckpointError, ConfigurationError, NoCheckpointError
from keras_distplug.storage import layout, survey
from keras_distplug.storage.files import Files, list_recursively, local_path, open_files
from keras_distplug.storage.survey import SurveyedRun

_LEVELS = 3  # of folders in which trainings are searched, as TensorBoard's tab does
_MOST_FOLDERS = 5000  # to list in one search
_MOST_NAMES = 8  # to print in an error
_MOST_CHILDREN = 20  # of a remote folder to search for an error message
_FOLDERS = ("incidents", "hangs", "log")
_FILES = (".safetensors", ".txt", ".jsonl")
_IN_RUN = re.compile(r"log|(RUN|MODEL(-\d+)?)\.json")
_RUN_BELOW = re.compile(r"(?P<training>.+?)/run-\d{4,}/")


@dataclass(frozen=True)
class Location:
    """The place that a command works on.

    Args:
        files: The directory of the training.
        run: The name of the run's folder. Defaults to `None`: the path names no run.
        checkpoint: The name of the checkpoint's folder, or its step. Defaults to `None`.
        incident: The name of an incident's file. Defaults to `None`.
        is_copy: True if the checkpoint lies outside a run, such as in a local tier or in a backup.
            `run` is then the folder that contains it.
    """

    files: Files
    run: str | None = None
    checkpoint: int | str | None = None
    incident: str | None = None
    is_copy: bool = False

    def run_names(self) -> list[str]:
        """Returns the names of the selected runs, the oldest first.

        Raises:
            NoCheckpointError: If the run does not exist.
            CheckpointError: If the directory cannot be listed.
        """
        if self.is_copy and self.run is not None:
            return [self.run]
        return survey.run_names(self.files, self.run)

    def find_run(self) -> SurveyedRun:
        """Returns the selected run, by default the one that training resumes.

        Raises:
            NoCheckpointError: If the run does not exist.
            CheckpointError: If the directory cannot be listed.
        """
        if self.is_copy and self.run is not None:
            return survey.survey_run(self.files, self.run)
        return survey.find_run(self.files, self.run)


def of(parsed: argparse.Namespace, *, needs_run: bool = True) -> Location:
    """Returns what the arguments of a command select.

    Args:
        parsed: The arguments: `directory`, `storage_options`, `run` and, if the command has it,
            `step`.
        needs_run: True if the directory must contain a run.

    Raises:
        ConfigurationError: If the path and an option contradict each other.
        NoCheckpointError: If the directory contains no run. The message suggests similar paths.
        CheckpointError: If the directory cannot be listed.
    """
    found = find(parsed.directory, parsed.storage_options)
    run, checkpoint = parsed.run, getattr(parsed, "step", None)
    if isinstance(checkpoint, str) and "/" in checkpoint:
        in_option = _parts_of_name(checkpoint)
        run, checkpoint = run or in_option[0], in_option[1]
    if None not in (run, found.run) and run != found.run:
        raise _contradiction("run", found.run, run)
    place = layout.parse_place(str(found.checkpoint))
    if None not in (checkpoint, found.checkpoint) and checkpoint not in (
        found.checkpoint,
        place and place.step,
    ):
        raise _contradiction("checkpoint", found.checkpoint, checkpoint)
    found = replace(
        found,
        run=found.run or run,
        checkpoint=checkpoint if found.checkpoint is None else found.checkpoint,
    )
    if needs_run and found.run is None and not layout.runs(found.files):
        raise no_run(parsed.directory, parsed.storage_options, found.files)
    return found


def _contradiction(what: str, in_path: object, given: object) -> ConfigurationError:
    return ConfigurationError(
        f"The path contains the {what} {in_path}, but another argument asks for {given}. Omit that "
        "argument, or give the directory of the training job as the path."
    )


def _parts_of_name(text: str) -> tuple[str | None, str]:
    """Returns the run and the checkpoint in `run-0001/step-00000004` or a longer path."""
    parts = text.rstrip("/").split("/")
    runs = [part for part in parts if layout.is_run(part)]
    names = [part for part in parts if layout.parse_place(part)]
    return (runs[-1] if runs else None), (names[-1] if names else text)


def find(text: str, storage_options: Mapping[str, Any] | None = None) -> Location:
    """Resolves a path or URL, which need not exist.

    Args:
        text: The directory of a training job, or anything in it: the folder of a run, a checkpoint
            or a log, or a file in one of these.
        storage_options: Options of the store's fsspec file system.

    Raises:
        ConfigurationError: If it names no folder, or the packages of its store are missing.
        CheckpointError: If a folder cannot be listed.
    """
    path = _Path.of(text, storage_options)
    parts = path.parts
    runs = [number for number, part in enumerate(parts) if number and layout.is_run(part)]
    if runs:
        at, tail = runs[-1], parts[runs[-1] + 1 :]
        if not tail and not layout.runs(path.open(at + 1)):
            return Location(path.open(at), parts[at])
        if tail and (layout.parse_place(tail[0]) or _IN_RUN.fullmatch(tail[0])):
            checkpoint = tail[0] if layout.parse_place(tail[0]) else None
            return Location(path.open(at), parts[at], checkpoint)
    for at in range(len(parts) - 1, max(1, len(parts) - 4), -1):
        if layout.parse_place(parts[at]):
            is_directory = at == len(parts) - 1 and layout.runs(path.open(at + 1))
            if not is_directory:
                return Location(path.open(at - 1), parts[at - 1], parts[at], is_copy=True)
    if len(parts) > 1 and parts[-1] in _FOLDERS and not layout.runs(path.open(len(parts))):
        return Location(path.open(len(parts) - 1))
    if len(parts) > 2 and parts[-2] in _FOLDERS and parts[-1].endswith(_FILES):
        incident = parts[-1] if parts[-2] == "incidents" else None
        return Location(path.open(len(parts) - 2), incident=incident)
    return Location(open_files(text, storage_options))


@dataclass(frozen=True)
class _Path:
    """A path or URL in parts."""

    scheme: str
    parts: tuple[str, ...]
    options: Mapping[str, Any] | None

    @classmethod
    def of(cls, text: str, options: Mapping[str, Any] | None) -> _Path:
        if (local := local_path(text)) is not None:
            return cls("", tuple(local.as_posix().rstrip("/").split("/")), options)
        scheme, separator, rest = text.partition("://")
        return cls(scheme + separator, tuple(rest.rstrip("/").split("/")), options)

    def text(self, count: int) -> str:
        """Returns the path of the first `count` parts."""
        return (self.scheme + "/".join(self.parts[:count])) or "/"

    def open(self, count: int) -> Files:
        """Opens the folder of the first `count` parts."""
        return open_files(self.text(count), self.options)


def no_run(text: str, storage_options: Mapping[str, Any] | None, files: Files) -> NoCheckpointError:
    """Returns the error of a directory without a run, with what the user may have meant."""
    where = files.where()
    with contextlib.suppress(CheckpointError, ConfigurationError, OSError):
        if below := _children(files):
            listed = ", ".join(below[:_MOST_NAMES]) + (", ..." if len(below) > _MOST_NAMES else "")
            return NoCheckpointError(
                f"{where} contains no runs itself, but these of its subfolders do: {listed}. Pass "
                f"one of them, such as {where.rstrip('/')}/{below[0]}, or list all of them with "
                "`keras-distplug ls`."
            )
        if near := _near_miss(_Path.of(text, storage_options)):
            return NoCheckpointError(
                f"{where} does not exist or contains no runs. Did you mean {near}?"
            )
    return NoCheckpointError(
        f"{where} does not exist or contains no runs (folders such as run-0001). Pass the "
        "directory of a training job, by default keras_distplug_runs/<name of the script>. A run "
        "with delete_checkpoint=True is deleted when its training finishes."
    )


def _children(files: Files) -> list[str]:
    """Returns the folders in `files` that contain runs, with few requests."""
    names = [name for name in layout.names(files) if not name.startswith(".")]
    if not files.traits.is_near:
        names = names[:_MOST_CHILDREN]
    return [name for name in names if _holds_run(layout.names(files, name))]


def _near_miss(path: _Path) -> str | None:
    """Returns the path that exists and is most similar to one that does not."""
    for at in range(len(path.parts) - 1, 0, -1):
        names = layout.names(path.open(at))
        if path.parts[at] in names:
            return None  # it exists
        if names:
            close = difflib.get_close_matches(path.parts[at], names, n=1)
            return "/".join([path.text(at).rstrip("/"), close[0]]) if close else None
        if path.scheme and at < len(path.parts) - 2:
            break  # few requests to a store
    return None


def trainings(files: Files) -> list[str]:
    """Returns the folders below `files` that contain runs, sorted.

    Three levels of folders are searched on a disk, and all of them in an object store, which lists
    them with one request.

    Raises:
        CheckpointError: If the directory cannot be listed.
    """
    if (paths := list_recursively(files, "")) is not None:
        return sorted({match["training"] for path in paths if (match := _RUN_BELOW.match(path))})
    listed = 0

    def below(folder: str, levels: int) -> Iterator[str]:
        nonlocal listed
        listed += 1
        if listed > _MOST_FOLDERS:
            return
        try:
            names = layout.names(files, folder)
        except CheckpointError:
            if folder:
                return  # one folder that cannot be listed hides no other
            raise
        if folder and _holds_run(names):
            yield folder
        elif levels:
            for name in names:
                if not name.startswith("."):
                    yield from below(f"{folder}/{name}" if folder else name, levels - 1)

    return sorted(below("", _LEVELS))


def _holds_run(names: list[str]) -> bool:
    return any(layout.is_run(name) for name in names)
