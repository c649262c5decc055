"""Export of a checkpoint to a single file that other programs can read."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from keras_distplug.core.errors import ConfigurationError
from keras_distplug.storage import codec, survey
from keras_distplug.storage.files import Files
from keras_distplug.storage.retention import Mode
from keras_distplug.storage.store import CheckpointStore, Stored
from keras_distplug.storage.survey import SurveyedRun
from keras_distplug.storage.target import written

Format = Literal["keras", "weights.h5", "safetensors"]
FORMATS: tuple[Format, ...] = get_args(Format)
BEST = "best"

# Writes a checkpoint to a path, in a format that needs a Keras model. The first argument is the
# name of the run's folder.
SaveModel = Callable[[str, Stored, Path], None]


@dataclass(frozen=True)
class Export:
    """A request to export a checkpoint.

    Args:
        out: The file to write: a path, or a URL of a store.
        step: A step, the name of a checkpoint, or `"best"`. Defaults to the newest checkpoint.
        best_by: For `"best"`: a metric of the logs, and `"min"` or `"max"`.
        format: The file format. Defaults to the extension of `out`.
        overwrite: If `True`, an existing file of this name is replaced. Defaults to `False`.
        storage_options: Options of the fsspec file system of `out`. Defaults to none.
    """

    out: str
    step: int | str | None = None
    best_by: tuple[str, Mode] | None = None
    format: Format | None = None
    overwrite: bool = False
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.step, bool) or not isinstance(self.step, int | str | None):
            raise ConfigurationError(
                f'Expected `step` to be an integer, a checkpoint\'s name, "{BEST}" or None. '
                f"Received: {self.step!r}"
            )
        if self.step == BEST and self.best_by is None:
            raise ConfigurationError(
                f'Step "{BEST}" requires a metric and "min" or "max". In a script, set '
                '`BackupAndRestore(keep_best=("val_loss", "min", 1))`; on the command line, pass '
                "--metric val_loss --mode min."
            )
        if self.format not in (None, *FORMATS):
            raise ConfigurationError(
                f"Expected `format` to be one of {', '.join(FORMATS)}. Received: {self.format!r}"
            )
        _ = self.chosen_format

    @property
    def chosen_format(self) -> Format:
        if self.format is not None:
            return self.format
        for known in FORMATS:
            if self.out.endswith(f".{known}"):
                return known
        raise ConfigurationError(
            f"Expected a file name with one of the endings .{', .'.join(FORMATS)}, or an explicit "
            f"`format` (--format). Received: {self.out!r}"
        )


@dataclass(frozen=True)
class ExportResult:
    """A finished export: the names of run and checkpoint, and the file."""

    run: str
    checkpoint: str
    format: Format
    out: str


def export(
    files: Files, run: SurveyedRun | str | None, asked: Export, save: SaveModel
) -> ExportResult:
    """Writes a checkpoint to a single file, verifying its values as they are read.

    Args:
        files: The directory that holds the runs.
        run: The name of the run. `None` for the run that training would resume.
        asked: The checkpoint to export and the file to write.
        save: A function that writes the formats that need a Keras model.

    Raises:
        ConfigurationError: If the request is invalid.
        NoCheckpointError: If the checkpoint does not exist.
        CorruptCheckpointError: If it is damaged. No file is written then.
        CheckpointError: If reading or writing fails.
    """
    kind = asked.chosen_format
    seen = run if isinstance(run, SurveyedRun) else survey.find_run(files, run)
    if asked.step == BEST and asked.best_by is not None:
        chosen = survey.choose_best(files, seen, *asked.best_by)
    else:
        chosen = survey.choose(files, seen, asked.step)
    stored = CheckpointStore(files, seen.name).read(chosen.name)
    ending = f".{kind}"
    with written(asked.out, ending, asked.storage_options, overwrite=asked.overwrite) as path:
        if kind == "safetensors":
            write_safetensors(path, seen.name, stored)
        else:
            save(seen.name, stored, path)
    return ExportResult(seen.name, chosen.name, kind, asked.out)


def write_safetensors(path: Path, run: str, stored: Stored) -> None:
    """Writes the model's variables, without the optimizer's, one after another.

    The file's metadata names their source, and the types of variables that are stored as plain
    bytes because safetensors does not have their type.
    """
    specs = [each for each in stored.manifest.variables if each.key.startswith("model/")]
    pieces = codec.share(specs, 0, 1)
    head = codec.header(pieces, _metadata(run, stored))
    places, offset = {}, len(head)
    for piece in pieces:
        places[piece.name] = offset
        offset += piece.bytes
    with open(path, "xb", buffering=0) as file:
        file.write(head)
        # In the order of the checkpoint, which may differ from that of the file.
        for key, value in stored.values():
            if key in places:
                data = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
                _write_at(file, data, places[key])
        file.truncate(offset)


def _write_at(file: io.FileIO, data: memoryview, offset: int) -> None:
    file.seek(offset)
    while data:
        data = data[file.write(data) :]


def _metadata(run: str, stored: Stored) -> dict[str, str]:
    manifest = stored.manifest
    raw = {
        each.key: each.dtype
        for each in manifest.variables
        if each.key.startswith("model/") and not codec.is_known(each.dtype)
    }
    return {
        "format": "keras_distplug",
        "run": run,
        "checkpoint": stored.name,
        "step": str(manifest.cursor.step),
        "epoch": str(manifest.cursor.epoch),
        "batch": str(manifest.cursor.batch),
        "created_utc": manifest.created_utc,
        "metrics": json.dumps(dict(manifest.metrics)),
        **({"raw_dtypes": json.dumps(raw)} if raw else {}),
    }
