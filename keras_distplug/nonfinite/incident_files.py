"""Batches whose update was left out, as files beside the runs.

A file is a safetensors file of the batch's arrays, whose metadata say the rest.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xxhash

from keras_distplug.core.errors import CheckpointError, CorruptCheckpointError, NoCheckpointError
from keras_distplug.core.hints import require_types
from keras_distplug.nonfinite import batches
from keras_distplug.storage import codec, layout
from keras_distplug.storage.files import Files
from keras_distplug.storage.manifest import VariableSpec
from keras_distplug.storage.sealed import ChangedError, digest_of

FOLDER = "incidents"
_DIGEST = "sha256"
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

    def __post_init__(self) -> None:
        if min(self.epoch, self.batch, self.replica) < 0:
            raise ValueError(f"Expected numbers of at least 0. Received: {self}")
        self.name  # noqa: B018 (raises if the time is none)

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
    pieces = codec.share(variables, 0, 1)
    metadata = {
        "format": "keras_distplug incident",
        "incident": json.dumps(asdict(incident)),
        "structure": json.dumps(structure),
        "arrays": json.dumps([(each.key, each.shape, each.dtype) for each in variables]),
    }
    head, *data = codec.encode(pieces, arrays)
    digest = _digest({"__metadata__": metadata, **json.loads(head[8:].tobytes())}, data)
    return codec.encode(pieces, arrays, {**metadata, _DIGEST: digest})


def _digest(header: Mapping[str, Any], data: Iterable[bytes | memoryview]) -> str:
    hashed = xxhash.xxh3_128()
    for part in data:
        hashed.update(part)
    return digest_of({"header": header, "data": hashed.hexdigest()})


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
        CorruptCheckpointError: If its file is no such file, or was changed.
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
    except ChangedError as error:
        raise CorruptCheckpointError(
            f"{files.where(path)} was changed after it was written."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{files.where(path)} is no file of an incident: {error!r}."
        ) from error


def _decoded(file: bytes) -> tuple[Incident, Any]:
    begin = 8 + int.from_bytes(file[:8], "little")
    header, data = json.loads(file[8:begin]), memoryview(file)[begin:]
    metadata = header["__metadata__"]
    # Earlier releases wrote none.
    digest = metadata.pop(_DIGEST, None)
    if digest is not None and digest != _digest(header, [data]):
        raise ChangedError
    incident = Incident(**json.loads(metadata["incident"]))
    require_types(incident)
    arrays, offset = {}, 0
    for key, shape, dtype in json.loads(metadata["arrays"]):
        spec = VariableSpec(key, tuple(shape), dtype)
        require_types(spec)
        end = offset + codec.bytes_of([spec])
        arrays[key] = np.frombuffer(data[offset:end], np.dtype(dtype)).reshape(spec.shape)
        offset = end
    if offset != len(data):
        raise ValueError(f"arrays of {offset} bytes, in a file with {len(data)}")
    return incident, batches.put_together(json.loads(metadata["structure"]), arrays)
