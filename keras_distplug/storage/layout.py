"""Where everything stands in a directory.

    <directory>/
      .owner/                               which process writes here: ownership.py
      run-0001/
        RUN.json                            who began it, and the seed of its data
        MODEL.json                          how its model is made, if Keras can tell that
        MODEL-2.json                        the same, for a model that was changed since
        step-00000042/                      a checkpoint of a run under way
          3f0c...-1/rank-0-1.safetensors    a worker's share, in a folder of this attempt's own
          3f0c...-1/rank-0-2.safetensors
          3f0c...-1/rank-1-1.safetensors
          MANIFEST.json                     written last: now the checkpoint exists
        step-00000042-2/                    another one of the same step
        final-00000210/                     one of a run that has reached its end
        log/                                what happened: runlog/log_files.py
      hangs/20261122T101112Z-worker-1.txt   stacks of a process that a HangWatchdog has ended
      incidents/20261122T101112Z-epoch-1-batch-4-replica-0.safetensors
                                            a batch whose update a NaNWatchdog has left out

But for the log, no file is ever changed. A save that is cut off leaves a folder without a manifest,
which does not count and goes with a later cleaning. A checkpoint whose bytes are not those that
were committed gets a DAMAGED.json, is named to the user, and stays as it is.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from typing import Literal

from keras_distplug.core.errors import CheckpointError
from keras_distplug.storage.files import Files, LinkError, unlistable

Kind = Literal["step", "final"]

RECORD, MANIFEST, DAMAGED = "RUN.json", "MANIFEST.json", "DAMAGED.json"

_RUN = re.compile(r"run-(\d{4,})")
_MODEL = re.compile(r"MODEL(?:-(\d+))?\.json")
_CHECKPOINT = re.compile(r"(step|final)-(\d{8,})(?:-(\d+))?")


@dataclass(frozen=True, order=True)
class Place:
    """The `number`-th checkpoint of a step. The newest is the greatest."""

    step: int
    number: int
    kind: Kind

    @property
    def name(self) -> str:
        name = f"{self.kind}-{self.step:08d}"
        return name if self.number == 1 else f"{name}-{self.number}"


def runs(files: Files) -> list[tuple[int, str]]:
    """Numbers and names of the runs' folders, the oldest first."""
    found = (_RUN.fullmatch(name) for name in names(files))
    return sorted((int(match[1]), match[0]) for match in found if match)


def places(files: Files, run: str) -> list[Place]:
    """Where checkpoints stand or are being written, the oldest first."""
    found = map(place_of, names(files, run))
    return sorted(place for place in found if place is not None)


def place_of(name: str) -> Place | None:
    """The inverse of `Place.name`; None if it is the name of something else."""
    match = _CHECKPOINT.fullmatch(name)
    if match is None:
        return None
    kind: Kind = "step" if match[1] == "step" else "final"
    return Place(int(match[2]), int(match[3] or 1), kind)


def models(files: Files, run: str) -> list[tuple[int, str]]:
    """Numbers and names of the files that say how a run's model is made, the oldest first."""
    found = (_MODEL.fullmatch(name) for name in names(files, run))
    return sorted((int(match[1] or 1), match[0]) for match in found if match)


def model_file(number: int) -> str:
    """The inverse of `models`."""
    return "MODEL.json" if number == 1 else f"MODEL-{number}.json"


def shard_file(attempt: str, rank: int, number: int) -> str:
    """The `number`-th file that a worker writes, from its checkpoint's folder."""
    return f"{attempt}/rank-{rank}-{number}.safetensors"


def is_run(name: str) -> bool:
    """Whether this is the name of a run's folder."""
    return _RUN.fullmatch(name) is not None


def run_folder_of(path: str) -> str | None:
    """The folder of the run that `path` belongs to; None for what is beside runs."""
    parts = path.split("/")
    runs = [place for place, part in enumerate(parts) if is_run(part)]
    return "/".join(parts[: runs[-1] + 1]) if runs else None


def names(files: Files, folder: str = "") -> list[str]:
    """What stands in `folder`.

    Raises:
        CheckpointError: If it cannot be listed.
    """
    try:
        return files.names(folder)
    except OSError as error:
        raise unlistable(files, folder, error) from error


def inside(files: Files, folder: str) -> list[str]:
    """Returns what the folder of a checkpoint contains.

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
