"""The body of a request to an object store, without a copy of the data."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator

_CHUNK_BYTES = 2**18


class RequestBody:
    """Parts of memory that are sent as one file.

    As `bytes`, they would be copied into new memory, and every remainder that the socket does not
    accept immediately would be copied again: most of the CPU time of sending. botocore reads and
    seeks as in a file, for checksums and before retries; aiohttp iterates, from the start every
    time.
    """

    def __init__(self, parts: Iterable[bytes | memoryview]) -> None:
        self._parts = [memoryview(part).cast("B") for part in parts]
        self._size = sum(map(len, self._parts))
        self._at = 0

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return b"".join(self._parts)

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = {0: 0, 1: self._at, 2: self._size}[whence] + offset
        return self._at

    def read(self, size: int | None = None) -> bytes:
        end = self._size if size is None or size < 0 else min(self._size, self._at + size)
        data = b"".join(self._between(self._at, end))
        self._at += len(data)
        return data

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        for part in self._parts:
            for begin in range(0, len(part), _CHUNK_BYTES):
                yield part[begin : begin + _CHUNK_BYTES]

    def _between(self, begin: int, end: int) -> Iterator[memoryview]:
        offset = 0
        for part in self._parts:
            if begin < offset + len(part) and offset < end:
                yield part[max(0, begin - offset) : end - offset]
            offset += len(part)
