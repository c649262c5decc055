"""Arrays as the bytes of a safetensors file, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes  # noqa: F401  (teaches NumPy the names bfloat16, float8_e4m3fn, ...)
import numpy as np
import safetensors
import xxhash
from safetensors.numpy import save

from keras_distplug.core.errors import CorruptCheckpointError
from keras_distplug.core.manifest import VariableSpec

_NATIVE = frozenset(
    {
        *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
        *("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    }
)


def specs_of(arrays: Mapping[str, Any]) -> tuple[VariableSpec, ...]:
    """What `decode` has to know besides the bytes."""
    return tuple(
        VariableSpec(key, array.shape, array.dtype.name)
        for key, array in ((key, np.asarray(value)) for key, value in arrays.items())
    )


def encode(arrays: Mapping[str, Any]) -> bytes:
    """The bytes of a safetensors file that holds `arrays`.

    A type that safetensors does not know (complex numbers) is stored as its bytes, in a row; its
    shape and type are in `specs_of`.

    Raises:
        TypeError: For an array of text or of objects.
    """
    data: bytes = save({key: _storable(key, value) for key, value in arrays.items()})
    return data


def decode(data: bytes, source: str) -> dict[str, bytes]:
    """The bytes of each array in `data`, which `encode` gave.

    Args:
        data: The content of a file.
        source: Its name, for errors.

    Raises:
        CorruptCheckpointError: If it is no safetensors file.
    """
    try:
        entries: list[tuple[str, Any]] = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise CorruptCheckpointError(f"{source} is no safetensors file: {error}") from error
    return {key: entry["data"] for key, entry in entries}


def arrays_of(
    contents: Mapping[str, bytes], specs: Iterable[VariableSpec], source: str
) -> dict[str, np.ndarray]:
    """Arrays from their bytes, in the order of `specs`.

    Args:
        contents: From `decode`, of all shards.
        specs: From `specs_of`.
        source: The checkpoint's name, for errors.

    Raises:
        CorruptCheckpointError: If one is missing or does not fit.
    """
    arrays = {}
    for spec in specs:
        if spec.key not in contents:
            raise CorruptCheckpointError(f"{source} does not hold the variable `{spec.key}`.")
        try:
            flat = np.frombuffer(contents[spec.key], np.dtype(spec.dtype))
            arrays[spec.key] = flat.reshape(spec.shape)
        except (ValueError, TypeError) as error:
            raise CorruptCheckpointError(f"{source}: `{spec}` cannot be read: {error}") from error
    return arrays


def xxh3_128(data: bytes) -> str:
    """XXH3 of `data`, 128 bits in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def _storable(key: str, value: Any) -> np.ndarray:
    array = np.asarray(value, order="C")
    if array.dtype.kind in "OSU":
        raise TypeError(f"Expected numbers in the variable `{key}`. Received: {array.dtype}")
    if array.dtype.name in _NATIVE:
        return array
    # `specs_of` does not name the order of the bytes.
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return native.reshape(-1).view(np.uint8)
