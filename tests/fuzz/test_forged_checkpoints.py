"""Forged checkpoints with correct checksums.

Checksums detect damage, but not intent. Whatever a manifest or a header contains, reading it
returns arrays or raises an error of ours, uses no more memory than the files are large, and reads
no file outside of the checkpoint.

"""

from __future__ import annotations

import contextlib
import json
import tracemalloc
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import xxhash
from fuzz.mutations import mutated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from storage.checkpoints import RUN, Checkpoints

from keras_distplug.core.errors import CheckpointError, DistplugError
from keras_distplug.core.state import Cursor, TrainState
from keras_distplug.storage import layout, runs
from keras_distplug.storage.files import Files, open_files
from keras_distplug.storage.manifest import Manifest
from keras_distplug.storage.sealed import compute_digest
from keras_distplug.storage.store import CheckpointStore

LIMITS = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
MOST_BYTES = 64 * 2**20
"""The memory limit, for files of some thousand bytes: far less than forged sizes request."""


def fresh() -> Files:
    return open_files(f"memory://{uuid.uuid4().hex}")


def _body() -> tuple[dict[str, Any], bytes]:
    """Returns the manifest of a checkpoint, and its shard."""
    files = fresh()
    arrays = {
        "model/dense/kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
        "model/dense/bias": np.zeros(3, np.float32),
        "optimizer/iterations": np.array(7),
    }
    history = {"loss": [0.5, 0.25]}
    Checkpoints(files).save(TrainState(Cursor(1, 2, 42), arrays, history, (0, 1)))
    [place] = layout.places(files, RUN)
    body = json.loads(files.read(f"{RUN}/{place.name}/{layout.MANIFEST}"))
    del body["sha256"]
    shard = files.read(f"{RUN}/{place.name}/{body['shards'][0]['file']}")
    return body, shard


BODY, SHARD = _body()
HEADER = json.loads(SHARD[8 : 8 + int.from_bytes(SHARD[:8], "little")])


def text_of(body: Any) -> str:
    if not isinstance(body, dict):
        return json.dumps(body)
    return json.dumps({**body, "sha256": compute_digest(body)})


class Recorded:
    """Files that record which ones were read."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.paths: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name in ("read", "read_into", "size"):
                self.paths.add(args[0])
            return getattr(self._files, name)(*args, **kwargs)

        found = getattr(self._files, name)
        return call if callable(found) else found


def read_all(body: Any, shard: bytes = SHARD) -> None:
    """Reads a checkpoint in all ways, as far as possible."""
    stored = fresh()
    name = "step-00000042"
    stored.create(f"{RUN}/{name}/{layout.MANIFEST}", [text_of(body).encode()])
    stored.create(f"{RUN}/{name}/{BODY['shards'][0]['file']}", [shard])
    files = Recorded(stored)
    store = CheckpointStore(files, RUN)  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        for way in (
            lambda: store.verify(name),
            lambda: store.verify(name, deep=False),
            lambda: store.read(name).arrays,
        ):
            with contextlib.suppress(CheckpointError):
                way()
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    assert all(path.startswith(f"{RUN}/{name}/") and ".." not in path for path in files.paths)


def test_valid() -> None:
    """The original of the mutations below is readable."""
    Manifest.from_json(text_of(BODY), "here")
    read_all(BODY)


@LIMITS
@given(st.one_of(st.text(), st.binary().map(lambda data: data.decode("latin1"))))
def test_any_text(text: str) -> None:
    with pytest.raises(CheckpointError):
        Manifest.from_json(text, "here")


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "1" * 100_000, '{"sha256":NaN}']
)
def test_any_depth(text: str) -> None:
    with pytest.raises(CheckpointError):
        Manifest.from_json(text, "here")


def test_file_twice() -> None:
    body = json.loads(json.dumps(BODY))
    body["shards"] *= 2
    read_all(body)


@LIMITS
@given(mutated(BODY))
def test_manifests(body: Any) -> None:
    read_all(body)


@pytest.mark.parametrize(
    "shape", [[10**12], [10**6, 10**6, 10**6], [2**63], [-1], [-2, -3], ["2", 3], 5, None, [2.0, 3]]
)
@pytest.mark.parametrize("number", [0, 1])
def test_sizes(shape: Any, number: int) -> None:
    """Sizes that are impossible, or too large for any file."""
    body = json.loads(json.dumps(BODY))
    body["variables"][number]["shape"] = shape
    read_all(body)


@pytest.mark.parametrize("dtype", ["f4,(", "i4,,i4", "float32;", "", "\x00", "(2,)f4", 5, None])
def test_types(dtype: Any) -> None:
    body = json.loads(json.dumps(BODY))
    body["variables"][0]["dtype"] = dtype
    with pytest.raises(CheckpointError):
        Manifest.from_json(text_of(body), "here")


@pytest.mark.parametrize(
    "file", ["../RUN.json", "/etc/passwd", "a/../../b", "", ".", "a\\b", "a\x00b", 5, None, ["a"]]
)
def test_paths(file: Any) -> None:
    body = json.loads(json.dumps(BODY))
    body["shards"][0]["file"] = file
    with pytest.raises(CheckpointError):
        Manifest.from_json(text_of(body), "here")


def shards() -> Iterator[st.SearchStrategy[bytes]]:
    data = SHARD[8 + int.from_bytes(SHARD[:8], "little") :]

    def with_header(header: Any) -> bytes:
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data

    yield mutated(HEADER).map(with_header)
    yield st.binary(max_size=200)
    yield st.tuples(st.integers(0, 2**64 - 1), st.binary(max_size=50)).map(
        lambda each: each[0].to_bytes(8, "little") + each[1]
    )


@LIMITS
@given(st.one_of(*shards()))
def test_shards(shard: bytes) -> None:
    """Their sizes and checksums match the manifest."""
    body = json.loads(json.dumps(BODY))
    body["shards"][0] |= {"bytes": len(shard), "xxh3_128": xxhash.xxh3_128(shard).hexdigest()}
    read_all(body, shard)


@LIMITS
@given(
    st.one_of(
        mutated({"run_id": "a", "job": None, "seed": 1, "created_utc": "b"}).map(text_of),
        st.text(),
    )
)
def test_records(text: str) -> None:
    files = fresh()
    files.create(f"{RUN}/{layout.RECORD}", [text.encode("utf-8", "surrogatepass")])
    with contextlib.suppress(DistplugError):
        runs.read_run(files, RUN)
