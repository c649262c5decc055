"""Batches of skipped updates, stored as files alongside the runs.

Every file is a safetensors file of the batch's arrays, with everything else in its metadata.
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
from keras_distplug.storage.files import Files, remedy
from keras_distplug.storage.manifest import VariableSpec
from keras_distplug.storage.sealed import ChangedError, compute_digest

FOLDER = "incidents"
_DIGEST = "sha256"
_NAME = re.compile(r"\d{8}T\d{6}Z-.*\.safetensors")


@dataclass(frozen=True)
class Incident:
    """A skipped update, as seen by one replica.

    Args:
        run: The run's name.
        epoch: The index of the epoch, from 0.
        batch: The index of the batch in the epoch, from 0; the first one of an execution of several
            steps.
        replica: The replica's number among all replicas.
        told: The message that was logged about it.
        created_utc: The time in ISO 8601, in seconds.
    """

    run: str
    epoch: int
    batch: int
    replica: int
    told: str
    created_utc: str

    def __post_init__(self) -> None:
        if min(self.epoch, self.batch, self.replica) < 0:
            raise ValueError(
                f"Expected `epoch`, `batch` and `replica` to be at least 0. Received: {self}"
            )
        self.name  # noqa: B018 (raises if the time is invalid)

    @property
    def name(self) -> str:
        """The name of its file."""
        made = datetime.datetime.fromisoformat(self.created_utc)
        place = f"epoch-{self.epoch + 1}-batch-{self.batch + 1}-replica-{self.replica}"
        return f"{made:%Y%m%dT%H%M%SZ}-{place}.safetensors"

    @property
    def path(self) -> str:
        return f"{FOLDER}/{self.name}"


def encode(incident: Incident, batch: Any) -> Iterator[memoryview]:
    """Yields the parts of an incident's file.

    Raises:
        TypeError: If the batch is not made of numeric arrays in tuples, lists and dictionaries.
    """
    structure, arrays = batches.split_batch(batch)
    variables = codec.make_specs(arrays)
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
    return compute_digest({"header": header, "data": hashed.hexdigest()})


def names(files: Files) -> list[str]:
    """Returns the names of all incidents' files, oldest first."""
    return [name for name in layout.names(files, FOLDER) if _NAME.fullmatch(name)]


def read(files: Files, name: str | None = None) -> tuple[Incident, Any]:
    """Reads an incident and its batch.

    Args:
        files: The directory.
        name: The name of its file. Defaults to the newest.

    Raises:
        NoCheckpointError: If the incident does not exist.
        CorruptCheckpointError: If its file is not an incident's file, or was changed.
        CheckpointError: If it cannot be read.
    """
    there = names(files)
    if not there or name not in (None, *there):
        what = "no saved batch" if name is None else f"no saved batch {name!r}"
        raise NoCheckpointError(
            f"{files.where(FOLDER)} contains {what}. Existing ones: {', '.join(there) or 'none'}. "
            "Pass the directory that training was given. NaNWatchdog saves at most "
            "`max_incidents` skipped batches per worker there, if BackupAndRestore is among the "
            "callbacks, and none under ParameterServerStrategy."
        )
    path = f"{FOLDER}/{name or there[-1]}"
    try:
        data = files.read(path)
    except OSError as error:
        raise CheckpointError(
            f"{files.where(path)} cannot be read: {error}. {remedy(error)}"
        ) from error
    try:
        return _decoded(data)
    except ChangedError as error:
        raise CorruptCheckpointError(
            f"{files.where(path)} was changed after it was written: its checksum differs."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{files.where(path)} is not a valid incident file: {error!r}."
        ) from error


def _decoded(file: bytes) -> tuple[Incident, Any]:
    begin = 8 + int.from_bytes(file[:8], "little")
    header, data = json.loads(file[8:begin]), memoryview(file)[begin:]
    metadata = header["__metadata__"]
    # Earlier releases wrote no digest.
    digest = metadata.pop(_DIGEST, None)
    if digest is not None and digest != _digest(header, [data]):
        raise ChangedError
    incident = Incident(**json.loads(metadata["incident"]))
    require_types(incident)
    arrays, offset = {}, 0
    for key, shape, dtype in json.loads(metadata["arrays"]):
        spec = VariableSpec(key, tuple(shape), dtype)
        require_types(spec)
        end = offset + codec.count_bytes([spec])
        arrays[key] = np.frombuffer(data[offset:end], np.dtype(dtype)).reshape(spec.shape)
        offset = end
    if offset != len(data):
        raise ValueError(f"expected {offset} bytes of arrays, received {len(data)}")
    return incident, batches.join_batch(json.loads(metadata["structure"]), arrays)
