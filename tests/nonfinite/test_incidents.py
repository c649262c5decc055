"""Files of batches whose update was skipped."""

from __future__ import annotations

import copy
import json
import math
import os
import stat
import uuid
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from fuzz.mutations import places_in

from keras_distplug.core.errors import CheckpointError, CorruptCheckpointError, NoCheckpointError
from keras_distplug.nonfinite import incident_files
from keras_distplug.nonfinite.incident_files import Incident
from keras_distplug.storage.files import Files, create_private, open_files

RNG = np.random.default_rng(0)
BATCH = RNG.normal(size=(2, 3))


def incident(**changes: Any) -> Incident:
    told = "replica 1 (worker-1 on h) has a loss of nan"
    return Incident(
        **{
            "run": "run-0001",
            "epoch": 0,
            "batch": 3,
            "replica": 1,
            "told": told,
            "created_utc": "2026-11-22T10:11:12+00:00",
            **changes,
        }
    )


@pytest.fixture(params=["local", "memory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    return open_files(tmp_path if request.param == "local" else f"memory://{uuid.uuid4().hex}")


def kept(files: Files, batch: Any = BATCH, **changes: Any) -> Incident:
    made = incident(**changes)
    files.create(made.path, incident_files.encode(made, batch))
    return made


def bits(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: bits(each) for key, each in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(map(bits, batch))
    return None if batch is None else (batch.dtype, batch.shape, batch.tobytes())


@pytest.mark.parametrize(
    "batch",
    [
        (np.array([[np.nan, -0.0, np.inf]], "float32"), np.arange(3)),
        ({"a": RNG.normal(size=(2, 3)), "b": [np.array(True), np.zeros((0, 4), "int8")]}, None),
        (RNG.normal(size=4).astype(ml_dtypes.bfloat16), RNG.normal(size=4) + 1j),
        RNG.normal(size=(4, 3)).T,
    ],
    ids=["usual", "nested", "other types", "not contiguous"],
)
def test_round_trip(files: Files, batch: Any) -> None:
    """Reading returns exactly the values written, bit for bit."""
    made = kept(files, batch)
    read, again = incident_files.read(files)
    assert read == made
    assert bits(again) == bits(batch)


def test_readable_by_safetensors(tmp_path: Path) -> None:
    """It is a file that the safetensors library can read."""
    x = RNG.normal(size=(2, 3))
    made = kept(open_files(tmp_path), (x, np.arange(2)))
    loaded = safetensors.numpy.load_file(tmp_path / made.path)
    assert sorted(loaded) == ["x", "y"]
    assert np.array_equal(loaded["x"], x)
    with safetensors.safe_open(tmp_path / made.path, "numpy") as file:
        assert json.loads(file.metadata()["incident"])["replica"] == 1


def test_names(files: Files) -> None:
    """The newest one is read by default; other files are not incidents."""
    older = kept(files, replica=9)
    newer = kept(files, created_utc="2026-11-22T10:11:13+00:00")
    assert older.name == "20261122T101112Z-epoch-1-batch-4-replica-9.safetensors"
    files.create("incidents/notes.txt", [b"of a person"])
    assert incident_files.names(files) == [older.name, newer.name]
    assert incident_files.read(files)[0] == newer
    assert incident_files.read(files, older.name)[0] == older


def test_no_incidents(files: Files) -> None:
    with pytest.raises(NoCheckpointError, match="contains no saved batch\\. Existing ones: none"):
        incident_files.read(files)
    made = kept(files)
    with pytest.raises(NoCheckpointError, match=f"no saved batch 'it'. Existing ones: {made.name}"):
        incident_files.read(files, "it")


@pytest.mark.parametrize("length", [0, 4, 100, -1])
def test_damaged(files: Files, length: int) -> None:
    made = incident()
    whole = b"".join(incident_files.encode(made, np.arange(4)))
    files.create(made.path, [whole[:length]])
    what = "was changed" if length < 0 else "is not a valid incident file"
    with pytest.raises(CorruptCheckpointError, match=f"{made.name} {what}"):
        incident_files.read(files)


@pytest.mark.parametrize("place", [300, -1])
def test_changed(files: Files, place: int) -> None:
    """A changed bit of the description or of the batch is detected."""
    made = incident()
    whole = bytearray(b"".join(incident_files.encode(made, np.arange(4))))
    whole[place] ^= 1
    files.create(made.path, [whole])
    with pytest.raises(CorruptCheckpointError, match=f"{made.name} (was changed|is not the file)"):
        incident_files.read(files)


def test_without_a_digest(files: Files) -> None:
    """Files of earlier releases, which have no digest, are read."""
    made = incident()
    [head, *data] = incident_files.encode(made, BATCH)
    header = json.loads(bytes(head[8:]))
    del header["__metadata__"]["sha256"]
    text = json.dumps(header).encode()
    files.create(made.path, [len(text).to_bytes(8, "little"), text, *data])
    read, batch = incident_files.read(files)
    assert read == made
    assert bits(batch) == bits(BATCH)


NASTY = (math.nan, 10**400, -1, None, True, "", "\ud800", [], {}, [[]], {"a": 1}, "x" * 10**6)


@pytest.mark.parametrize("part", ["incident", "structure", "arrays"])
def test_forged(files: Files, part: str) -> None:
    """A file with a correct digest but impossible contents is rejected, or read as it is."""
    made = incident()
    [head, *data] = incident_files.encode(made, (BATCH, np.arange(2)))
    metadata = json.loads(bytes(head[8:]))["__metadata__"]
    whole = json.loads(metadata[part])
    refused = 0
    for place in list(places_in(whole)):
        for value in (*NASTY, "deep"):
            text = json.dumps(replaced(whole, place, value))
            forged = {**metadata, part: text.replace('"deep"', "[" * 5000 + "]" * 5000)}
            del forged["sha256"]
            forged["sha256"] = incident_files._digest({"__metadata__": forged}, data)
            header = json.dumps({"__metadata__": forged}).encode()
            files.delete(made.path)
            files.create(made.path, [len(header).to_bytes(8, "little"), header, *data])
            try:
                incident_files.read(files)
            except CorruptCheckpointError:
                refused += 1
    assert refused > 20


def replaced(whole: Any, place: tuple[Any, ...], value: Any) -> Any:
    holder = {"it": copy.deepcopy(whole)}
    *way, last = ("it", *place)
    parent: Any = holder
    for key in way:
        parent = parent[key]
    parent[last] = value
    return holder["it"]


def test_private(tmp_path: Path) -> None:
    """Only the owner can read a batch, whatever the umask."""
    before = os.umask(0)
    try:
        files = open_files(tmp_path)
        made = incident()
        create_private(files, made.path, incident_files.encode(made, BATCH))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / made.path).stat().st_mode) == 0o600
    assert incident_files.read(files)[0] == made


def test_not_read(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(files)

    def fails(path: str) -> bytes:
        raise PermissionError(path)

    monkeypatch.setattr(files, "read", fails)
    with pytest.raises(CheckpointError, match="cannot be read"):
        incident_files.read(files)


def test_non_numeric_values(files: Files) -> None:
    with pytest.raises(TypeError, match="Expected the array `y` to hold numbers"):
        incident_files.encode(incident(), (np.arange(2), np.array(["a", "b"])))
