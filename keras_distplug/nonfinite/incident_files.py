"""Batches whose update was left out, as files beside the runs.

A file is a safetensors file of the batch's arrays, whose metadata say the rest.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from keras_distplug.core.errors import CheckpointError, CorruptCheckpointError, NoCheckpointError
from keras_distplug.nonfinite import batches
from keras_distplug.storage import codec, layout
from keras_distplug.storage.files import Files
from keras_distplug.storage.manifest import VariableSpec

FOLDER = "incidents"
_NAME = re.compile(r"\d{8}T\d{6}Z-.*\.safetensors")


@dataclass(frozen=True)
class Incident:
    """An update that was left out, as one replica met it.

    Args:
        run: The run's name.
        epoch: Counted from 0.
        batch: In the epoch, counted from 0; of an execution of several steps, its first one.
        replica: Its number among all replicas.
        told: What was said of it.
        created_utc: ISO 8601, to the second.
    """

    run: str
    epoch: int
    batch: int
    replica: int
    told: str
    created_utc: str

    @property
    def name(self) -> str:
        """That of its file."""
        made = datetime.datetime.fromisoformat(self.created_utc)
        place = f"epoch-{self.epoch + 1}-batch-{self.batch + 1}-replica-{self.replica}"
        return f"{made:%Y%m%dT%H%M%SZ}-{place}.safetensors"

    @property
    def path(self) -> str:
        return f"{FOLDER}/{self.name}"


def encode(incident: Incident, batch: Any) -> Iterator[memoryview]:
    """The parts of an incident's file.

    Raises:
        TypeError: For a batch of other things than arrays of numbers in tuples, lists and
            dictionaries.
    """
    structure, arrays = batches.taken_apart(batch)
    variables = codec.specs_of(arrays)
    metadata = {
        "format": "keras_distplug incident",
        "incident": json.dumps(asdict(incident)),
        "structure": json.dumps(structure),
        "arrays": json.dumps([(each.key, each.shape, each.dtype) for each in variables]),
    }
    return codec.encode(codec.share(variables, 0, 1), arrays, metadata)


def names(files: Files) -> list[str]:
    """Those of all incidents' files, the oldest first."""
    return [name for name in layout.names(files, FOLDER) if _NAME.fullmatch(name)]


def read(files: Files, name: str | None = None) -> tuple[Incident, Any]:
    """An incident, and its batch.

    Args:
        files: The directory.
        name: That of its file. Defaults to the newest.

    Raises:
        NoCheckpointError: If there is none.
        CorruptCheckpointError: If its file is no such file.
        CheckpointError: If it cannot be read.
    """
    there = names(files)
    if not there or name not in (None, *there):
        what = "no incident" if name is None else f"no incident {name!r}"
        raise NoCheckpointError(
            f"{files.where(FOLDER)} holds {what}. Those there: {', '.join(there) or 'none'}. A "
            "NaNWatchdog beside a BackupAndRestore keeps them."
        )
    path = f"{FOLDER}/{name or there[-1]}"
    try:
        data = files.read(path)
    except OSError as error:
        raise CheckpointError(f"{files.where(path)} cannot be read: {error}.") from error
    try:
        return _decoded(data)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(
            f"{files.where(path)} is no file of an incident: {error!r}."
        ) from error


def _decoded(data: bytes) -> tuple[Incident, Any]:
    begin = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:begin])
    metadata = entries["__metadata__"]
    arrays = {}
    for key, shape, dtype in json.loads(metadata["arrays"]):
        low, high = entries[key]["data_offsets"]
        spec = VariableSpec(key, tuple(shape), dtype)
        flat = np.frombuffer(data[begin + low : begin + high], np.dtype(spec.dtype))
        arrays[key] = flat.reshape(spec.shape)
    batch = batches.put_together(json.loads(metadata["structure"]), arrays)
    return Incident(**json.loads(metadata["incident"])), batch
