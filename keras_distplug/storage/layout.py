"""The layout of a directory.

    <directory>/
      .owner/                               the process that writes here: ownership.py
      run-0001/
        RUN.json                            the run's identity, and the seed of its data
        MODEL.json                          the model's architecture, if Keras can serialize it
        MODEL-2.json                        the same, for a model that was changed since
        step-00000042/                      a checkpoint of a run in progress
          3f0c...-1/rank-0-1.safetensors    a worker's share, in a folder for this attempt
          3f0c...-1/rank-0-2.safetensors
          3f0c...-1/rank-1-1.safetensors
          MANIFEST.json                     written last: it makes the checkpoint exist
        step-00000042-2/                    another checkpoint of the same step
        final-00000210/                     the checkpoint of a run that has finished
        log/                                the log of events: runlog/log_files.py
      hangs/20261122T101112Z-worker-1.txt   stacks of a process that a HangWatchdog ended
      incidents/20261122T101112Z-epoch-1-batch-4-replica-0.safetensors
                                            a batch whose update a NaNWatchdog skipped

Except for the log, no file is ever changed. An interrupted save leaves a folder without a manifest,
which is ignored and deleted later. A checkpoint whose bytes are not those that were committed gets
a DAMAGED.json, is reported to the user, and is otherwise left unchanged.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from typing import Literal

from keras_distplug.core.errors import CheckpointError
from keras_distplug.storage.files import Files, LinkError, listing_error

Kind = Literal["step", "final"]

RECORD, MANIFEST, DAMAGED = "RUN.json", "MANIFEST.json", "DAMAGED.json"

_RUN = re.compile(r"run-(\d{4,})")
_MODEL = re.compile(r"MODEL(?:-(\d+))?\.json")
_CHECKPOINT = re.compile(r"(step|final)-(\d{8,})(?:-(\d+))?")


@dataclass(frozen=True, order=True)
class Place:
    """The place of the `number`-th checkpoint of a step. Places sort from oldest to newest."""

    step: int
    number: int
    kind: Kind

    @property
    def name(self) -> str:
        name = f"{self.kind}-{self.step:08d}"
        return name if self.number == 1 else f"{name}-{self.number}"


def runs(files: Files) -> list[tuple[int, str]]:
    """Returns the numbers and names of the runs' folders, oldest first."""
    found = (_RUN.fullmatch(name) for name in names(files))
    return sorted((int(match[1]), match[0]) for match in found if match)


def places(files: Files, run: str) -> list[Place]:
    """Returns the places of checkpoints, including ones being written, oldest first."""
    found = map(parse_place, names(files, run))
    return sorted(place for place in found if place is not None)


def parse_place(name: str) -> Place | None:
    """Returns the place named `name`; None if it is not the name of a checkpoint."""
    match = _CHECKPOINT.fullmatch(name)
    if match is None:
        return None
    kind: Kind = "step" if match[1] == "step" else "final"
    return Place(int(match[2]), int(match[3] or 1), kind)


def models(files: Files, run: str) -> list[tuple[int, str]]:
    """Returns the numbers and names of a run's architecture files, oldest first."""
    found = (_MODEL.fullmatch(name) for name in names(files, run))
    return sorted((int(match[1] or 1), match[0]) for match in found if match)


def model_file(number: int) -> str:
    """Returns the name of the `number`-th architecture file."""
    return "MODEL.json" if number == 1 else f"MODEL-{number}.json"


def shard_file(attempt: str, rank: int, number: int) -> str:
    """Returns the path of a worker's `number`-th file, relative to the checkpoint's folder."""
    return f"{attempt}/rank-{rank}-{number}.safetensors"


def is_run(name: str) -> bool:
    """True if this is the name of a run's folder."""
    return _RUN.fullmatch(name) is not None


def find_run_folder(path: str) -> str | None:
    """Returns the folder of the run that `path` belongs to; None for a path outside of runs."""
    parts = path.split("/")
    runs = [place for place, part in enumerate(parts) if is_run(part)]
    return "/".join(parts[: runs[-1] + 1]) if runs else None


def names(files: Files, folder: str = "") -> list[str]:
    """Returns the names of the files and folders in `folder`.

    Raises:
        CheckpointError: If it cannot be listed.
    """
    try:
        return files.names(folder)
    except OSError as error:
        raise listing_error(files, folder, error) from error


def inside(files: Files, folder: str) -> list[str]:
    """Returns the names of the files and folders in a checkpoint's folder.

    A link out of the run's folder is not followed. It counts as a damaged checkpoint, which is
    neither read nor deleted.
    """
    try:
        return names(files, folder)
    except CheckpointError as error:
        if isinstance(error.__cause__, LinkError):
            return [DAMAGED]
        raise


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
