"""The body of a request."""

from __future__ import annotations

import asyncio
import base64
import io
import zlib

import numpy as np
import pytest

from keras_distplug.storage import request_body
from keras_distplug.storage.request_body import RequestBody

PARTS = [b"ab", memoryview(b""), memoryview(np.arange(6, dtype=np.int16)), b"c" * 9]
DATA = b"".join(bytes(part) for part in PARTS)


def iterated(body: RequestBody) -> list[bytes]:
    async def read() -> list[bytes]:
        return [bytes(chunk) async for chunk in body]

    return asyncio.run(read())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 22, 23, 24, 1000, -1, None])
def test_read(size: int | None) -> None:
    """It can be read like a file, in portions of any size."""
    body, file = RequestBody(PARTS), io.BytesIO(DATA)
    portions = []
    while portion := body.read(size):
        assert portion == file.read(size)
        assert body.tell() == file.tell()
        portions.append(portion)
    assert b"".join(portions) == DATA


@pytest.mark.parametrize(("offset", "whence"), [(0, 0), (5, 0), (-3, 2), (0, 2), (2, 1), (-4, 1)])
def test_seek(offset: int, whence: int) -> None:
    body, file = RequestBody(PARTS), io.BytesIO(DATA)
    for each in (body, file):
        each.seek(7)
    assert body.seek(offset, whence) == file.seek(offset, whence)
    assert body.read() == file.read()


def test_every_iteration_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is sent again sends all of it, regardless of the position after the
    checksum."""
    monkeypatch.setattr(request_body, "_CHUNK_BYTES", 4)
    body = RequestBody(PARTS)
    body.read(10)
    for _ in range(2):
        chunks = iterated(body)
        assert b"".join(chunks) == DATA == bytes(body)
        assert max(map(len, chunks)) == 4
    assert body.tell() == 10


@pytest.mark.parametrize("parts", [[], [b""]])
def test_nothing(parts: list[bytes]) -> None:
    body = RequestBody(parts)
    assert (len(body), bytes(body), body.read(), iterated(body)) == (0, b"", b"", [])


def test_not_copied() -> None:
    """The memory itself is sent, not a copy."""
    memory = bytearray(b"before")
    body = RequestBody([memory])
    memory[:] = b"behind"
    assert bytes(body) == body.read() == b"".join(iterated(body)) == b"behind"


@pytest.mark.ci  # needs a package that `[test]` does not include
def test_checksum() -> None:
    """botocore computes the same checksum as for a file, and leaves the position at the start."""
    httpchecksum = pytest.importorskip("botocore.httpchecksum")
    body = RequestBody(PARTS)
    expected = base64.b64encode(zlib.crc32(DATA).to_bytes(4, "big")).decode()
    assert httpchecksum.Crc32Checksum().handle(body) == expected
    assert body.tell() == 0
