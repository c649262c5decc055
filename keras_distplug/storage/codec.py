"""Streaming reader and writer of arrays as safetensors files.

The format (https://github.com/huggingface/safetensors): eight bytes with the length of a JSON
header, the header, and the arrays' bytes, one array after another. The library of that name holds
a whole file in memory; this module writes files directly from arrays that are already in memory.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes  # noqa: F401  (teaches NumPy the names bfloat16, float8_e4m3fn, ...)
import numpy as np
import xxhash

from keras_distplug.core.errors import CorruptCheckpointError
from keras_distplug.storage.manifest import VariableSpec
from keras_distplug.storage.memory import Allocate, Memory
from keras_distplug.storage.parallel import bounded_parallel_map

# A part stays in a core's cache until it is hashed and written. Larger parts are slower, and so is
# hashing in a separate thread, which above all slows down the training that runs meanwhile.
PART_BYTES = 2**20
AHEAD_BYTES = 4 * 2**20  # larger for threads that read ahead: every handover has a cost, too
_SMALL_PIECES = 1000
_HEADER_BYTES = 10**8  # the format's maximum

_CODES = {
    **{"bool": "BOOL", "float16": "F16", "float32": "F32", "float64": "F64", "bfloat16": "BF16"},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
}
_PIECE = re.compile(r"(.*)\[(\d+):(\d+)\]", re.DOTALL)


@dataclass(frozen=True)
class Piece:
    """Elements of a variable, in row-major order: all of them, unless several workers share it.

    Args:
        variable: The variable.
        start: The index of the first element.
        stop: The index after the last element.
    """

    variable: VariableSpec
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == math.prod(self.variable.shape)

    @property
    def name(self) -> str:
        key = self.variable.key
        return key if self.is_whole else f"{key}[{self.start}:{self.stop}]"

    @property
    def bytes(self) -> int:
        return (self.stop - self.start) * _itemsize(self.variable)


def make_specs(arrays: Mapping[str, Any]) -> tuple[VariableSpec, ...]:
    """Returns the specs of `arrays`, which are NumPy arrays or TensorFlow tensors.

    Raises:
        TypeError: If an array holds strings or objects.
    """
    for key, value in arrays.items():
        if getattr(value.dtype, "kind", "") in ("O", "S", "U"):
            raise TypeError(
                f"Expected the array `{key}` to hold numbers. Received: an array of dtype "
                f"{value.dtype}"
            )
    return tuple(
        VariableSpec(key, tuple(map(int, value.shape)), value.dtype.name)
        for key, value in arrays.items()
    )


def count_bytes(variables: Iterable[VariableSpec]) -> int:
    """Returns the total size of `variables` in bytes."""
    return sum(math.prod(each.shape) * _itemsize(each) for each in variables)


def list_shard_files(variables: Sequence[VariableSpec], world_size: int, file_bytes: int) -> int:
    """Returns the number of files into which every one of `world_size` workers splits its share of
    `variables`, so that no file is larger than `file_bytes` plus a header."""
    return max(1, -(-count_bytes(variables) // (world_size * file_bytes)))


def share(variables: Sequence[VariableSpec], number: int, count: int) -> list[Piece]:
    """Returns the pieces of one file: an equal share of the bytes of `variables`, in their order.

    Args:
        variables: All variables, the same on all workers.
        number: The index of the share, from 0.
        count: The number of shares. Their sizes differ by at most one element.
    """
    total = count_bytes(variables)
    low, high = (total * each // count for each in (number, number + 1))
    pieces, offset = [], 0
    for variable in variables:
        itemsize, elements = _itemsize(variable), math.prod(variable.shape)
        start, stop = (min(max(-(-(cut - offset) // itemsize), 0), elements) for cut in (low, high))
        # A variable without elements goes to the share at its offset.
        is_here = low <= offset < high or (number == count - 1 and offset == total)
        if stop > start or (not elements and is_here):
            pieces.append(Piece(variable, start, stop))
        offset += elements * itemsize
    return pieces


def encode(
    pieces: Sequence[Piece],
    arrays: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
) -> Iterator[memoryview]:
    """Yields the parts of a safetensors file that holds `pieces`.

    A type that safetensors does not have (complex numbers) is stored as a flat array of bytes.

    Args:
        pieces: The pieces, from `share`.
        arrays: The variables' values by key: anything that `numpy.asarray` accepts.
        metadata: The file's metadata. `read` rejects a file that has any.

    Raises:
        ValueError: If a value does not match its spec.
    """
    yield memoryview(header(pieces, metadata))
    for piece in pieces:
        flat = _flatten(piece.variable, arrays[piece.variable.key])[piece.start : piece.stop]
        data = flat.view(np.uint8).data
        for begin in range(0, len(data), PART_BYTES):
            yield data[begin : begin + PART_BYTES]


def is_known(dtype: str) -> bool:
    """True if safetensors has this type. Others are written as bytes."""
    return dtype in _CODES


def header(pieces: Sequence[Piece], metadata: Mapping[str, str] | None = None) -> bytes:
    """Returns the bytes that precede the arrays in a file of `pieces`.

    Args:
        pieces: The contents of the file, in order.
        metadata: The file's metadata.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for piece in pieces:
        code = _CODES.get(piece.variable.dtype)
        shape = list(piece.variable.shape) if piece.is_whole else [piece.stop - piece.start]
        entries[piece.name] = {
            "dtype": code or "U8",
            "shape": shape if code else [piece.bytes],
            "data_offsets": [offset, offset + piece.bytes],
        }
        offset += piece.bytes
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % 64)  # align the arrays, so that copying them is fast
    return len(text).to_bytes(8, "little") + text


class Buffers:
    """Memory for the variables of a checkpoint, allocated per variable when its bytes arrive.

    Args:
        specs: All variables.
        allocate: Allocates memory for one variable. `None` for NumPy arrays.
        source: The checkpoint's name, for errors.

    Raises:
        CorruptCheckpointError: If a variable has an impossible type or shape.
    """

    def __init__(
        self, specs: Iterable[VariableSpec], allocate: Allocate | None, source: str
    ) -> None:
        self._allocate = allocate
        self._source = source
        self._specs = {spec.key: spec for spec in specs}
        for spec in self._specs.values():
            try:
                _require_numbers(spec.dtype)
                np.empty((0, *spec.shape), spec.dtype)
            except (TypeError, ValueError) as error:
                raise CorruptCheckpointError(
                    f"{source}: `{spec}` cannot be read: {error}."
                ) from error
        self._bytes = {key: count_bytes([spec]) for key, spec in self._specs.items()}
        self._missing = dict(self._bytes)
        self._memory: dict[str, Memory] = {}
        self._complete: list[str] = []

    def size(self, name: str) -> int:
        """Returns the size of the piece `name` in bytes.

        Raises:
            ValueError: If it belongs to no variable.
        """
        _, begin, end = self._find(name)
        return end - begin

    def place(self, name: str) -> memoryview:
        """Returns the memory for the piece `name`."""
        key, begin, end = self._find(name)
        if key not in self._memory:
            spec = self._specs[key]
            self._memory[key] = (self._allocate and self._allocate(spec)) or _allocate_numpy(spec)
        return self._memory[key].data[begin:end]

    def mark_filled(self, name: str) -> None:
        """Marks the piece `name` as read into its memory."""
        key, begin, end = self._find(name)
        if key not in self._missing:
            raise CorruptCheckpointError(f"{self._source} holds the variable `{key}` twice.")
        self._missing[key] -= end - begin
        if not self._missing[key]:
            self._complete.append(key)

    def take(self) -> list[tuple[str, Any]]:
        """Returns keys and values of the variables completed since the last call."""
        taken = [(key, self._memory.pop(key).value) for key in self._complete]
        for key, _ in taken:
            del self._missing[key]
        self._complete = []
        return taken

    def require_all_taken(self) -> None:
        """Raises `CorruptCheckpointError` if a variable was not read."""
        for key in self._missing:
            raise CorruptCheckpointError(f"{self._source} does not hold the variable `{key}`.")

    def _find(self, name: str) -> tuple[str, int, int]:
        """Returns a piece's variable and the range of its bytes in it."""
        if name in self._specs:
            return name, 0, self._bytes[name]
        if (match := _PIECE.fullmatch(name)) and match[1] in self._specs:
            itemsize = _itemsize(self._specs[match[1]])
            size = self._bytes[match[1]]
            begin, end = (min(int(match[each]) * itemsize, size) for each in (2, 3))
            return match[1], begin, end
        raise ValueError(f"{name} is not one of the checkpoint's variables")


def read(
    read_into: Callable[[int, memoryview], int],
    size: int,
    buffers: Buffers,
    source: str,
    readers: int = 1,
) -> Iterator[memoryview]:
    """Reads a file written by `encode` into the memory of its variables.

    Args:
        read_into: Fills a buffer with the file's bytes from an offset and returns their number.
        size: The size of the file in bytes. Whatever its header says, no more memory than this is
            allocated.
        buffers: The memory to read into.
        source: The file's name, for errors.
        readers: The number of reading threads. They also take over the first write to new memory,
            which is slow.

    Yields:
        The bytes read, in the file's order, for `Hashed`. They include a byte beyond the expected
        end if there is one, so that a file that is too long is detected.

    Raises:
        CorruptCheckpointError: If it is not such a file.
    """
    prefix = memoryview(bytearray(8))
    yield prefix[: read_into(0, prefix)]
    length = int.from_bytes(prefix, "little")
    if length > min(_HEADER_BYTES, size - 8):
        raise CorruptCheckpointError(
            f"{source} is not a safetensors file: it declares a header of {length} bytes, but has "
            f"{size} bytes in total, and the format allows headers of at most {_HEADER_BYTES} "
            "bytes."
        )
    header = memoryview(bytearray(length))
    yield header[: read_into(8, header)]
    pieces, end = _pieces(bytes(header), size - 8 - length, buffers, source), 0

    def read_part(part: _Part) -> tuple[_Part, int]:
        return part, read_into(8 + length + part.offset, part.memory)

    parts = _parts(pieces, buffers, PART_BYTES if readers == 1 else AHEAD_BYTES)
    for part, count in bounded_parallel_map((partial(read_part, part) for part in parts), readers):
        yield part.memory[:count]
        if count < len(part.memory):
            return
        for place, begin in part.scattered:
            place[:] = part.memory[begin : begin + len(place)]
        for name in part.completes:
            buffers.mark_filled(name)
        end = part.offset + count
    beyond = memoryview(bytearray(1))
    yield beyond[: read_into(8 + length + end, beyond)]


@dataclass(frozen=True)
class _Part:
    """One read request: a part of a large piece, or several small pieces.

    Args:
        offset: Its start in bytes, from the end of the header.
        memory: The memory to read into.
        completes: The names of the pieces that are complete after this read.
        scattered: The destinations of the small pieces, and their offsets in `memory`.
    """

    offset: int
    memory: memoryview
    completes: Sequence[str]
    scattered: Sequence[tuple[memoryview, int]] = ()


def _parts(pieces: Iterable[tuple[str, int]], buffers: Buffers, at_once: int) -> Iterator[_Part]:
    """Splits `pieces` into read requests, allocating memory for one request at a time."""
    offset = 0
    for names, size in _batch_reads(pieces):
        places = [buffers.place(name) for name in names]
        if len(places) == 1:
            for begin in range(0, max(size, 1), at_once):
                is_last = begin + at_once >= size
                memory = places[0][begin : begin + at_once]
                yield _Part(offset + begin, memory, names if is_last else ())
        else:
            begins = itertools.accumulate(map(len, places), initial=0)
            scattered = list(zip(places, begins, strict=False))
            yield _Part(offset, memoryview(bytearray(size)), names, scattered)
        offset += size


def _pieces(header: bytes, size: int, buffers: Buffers, source: str) -> list[tuple[str, int]]:
    """Returns the names and sizes of a file's pieces, in order; the sizes add up to `size`."""
    pieces, offset = [], 0
    try:
        entries = json.loads(header)
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            low, high = entry["data_offsets"]
            length = buffers.size(name)
            if low != offset or high - low != length:
                raise ValueError(
                    f"expected {name} at bytes {offset} to {offset + length}, not {low} to {high}"
                )
            offset = high
            pieces.append((name, length))
        if offset != size:
            raise ValueError(
                f"its header declares {offset} bytes of array data, but the file contains {size}"
            )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{source} is not a valid safetensors file of this checkpoint: {error}."
        ) from error
    return pieces


def _batch_reads(pieces: Iterable[tuple[str, int]]) -> Iterator[tuple[list[str], int]]:
    """Groups small pieces into one read. Yields the names and the total bytes of every read."""
    names: list[str] = []
    total = 0
    for name, size in pieces:
        if names and (total + size > PART_BYTES or len(names) == _SMALL_PIECES):
            yield names, total
            names, total = [], 0
        names.append(name)
        total += size
    if names:
        yield names, total


class Hashed:
    """Passes on the parts of a file, hashing every part while it is in the processor's cache.

    Attributes:
        bytes: The number of bytes passed on.
        xxh3_128: XXH3 of all parts, 128 bits in hexadecimal; set once all were passed on.
    """

    def __init__(self, parts: Iterable[memoryview]) -> None:
        self._parts = parts
        self.bytes = 0
        self.xxh3_128 = ""

    def __iter__(self) -> Iterator[memoryview]:
        hashed = xxhash.xxh3_128()
        for part in self._parts:
            hashed.update(part)
            self.bytes += part.nbytes
            yield part
        self.xxh3_128 = hashed.hexdigest()


def _require_numbers(dtype: str) -> None:
    """Raises TypeError for a type that is not a plain number, such as `"object"` or `"i4,i4"`."""
    found = np.dtype(dtype)
    if found.kind in "OSUMm" or found.name != dtype:
        raise TypeError(f"{dtype!r} is not a numeric type")


def _allocate_numpy(spec: VariableSpec) -> Memory:
    array = np.empty(spec.shape, np.dtype(spec.dtype))
    return Memory(array, array.reshape(-1).view(np.uint8).data)


def _itemsize(variable: VariableSpec) -> int:
    return np.dtype(variable.dtype).itemsize


def _flatten(variable: VariableSpec, value: Any) -> np.ndarray:
    """Returns the elements of a value as a flat array in this machine's byte order."""
    array = np.asarray(value)
    if (array.shape, array.dtype.name) != (variable.shape, variable.dtype):
        raise ValueError(
            f"Expected a value of shape {list(variable.shape)} and dtype {variable.dtype} for "
            f"`{variable.key}`. Received: shape {list(array.shape)} and dtype {array.dtype.name}."
        )
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return np.ascontiguousarray(native).reshape(-1)
