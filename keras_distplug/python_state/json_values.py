"""Converts numbers, text, arrays and nests of them, mainly from logs, to JSON and back.

Most logs are one number. Others are arrays (`F1Score` has one value per class), or anything else
that a callback adds.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

# Tags for types that JSON lacks.
_ARRAY, _TYPE, _SHAPE, _TUPLE = "__array__", "__type__", "__shape__", "__tuple__"
_RESERVED = frozenset({_ARRAY, _TYPE, _SHAPE, _TUPLE})
_MOST_LISTED = 64  # largest number of array elements written as numbers


def numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """Returns those of `logs` that are one number."""
    encoded = {name: encode(value) for name, value in logs.items()}
    return {
        name: float(value)
        for name, value in encoded.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def others(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rest of `logs`, JSON-able."""
    known = numbers(logs)
    return {name: encode(value) for name, value in logs.items() if name not in known}


def encode(value: Any) -> Any:
    """Returns `value` as JSON; None for types that `is_kept` does not accept."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [encode(each) for each in value]
        case tuple():
            return {_TUPLE: [encode(each) for each in value]}
        case dict() if _has_names(value):
            return {name: encode(each) for name, each in value.items()}
    if (array := _array(value)) is None:
        return None
    if array.ndim == 0:
        return float(array) if array.dtype == ml_dtypes.bfloat16 else array.item()
    if array.size > _MOST_LISTED:
        packed = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
        return {_ARRAY: packed, _TYPE: array.dtype.name, _SHAPE: list(array.shape)}
    plain = array.astype(float) if array.dtype == ml_dtypes.bfloat16 else array
    return {_ARRAY: plain.tolist(), _TYPE: array.dtype.name}


def decode(value: Any) -> Any:
    """The inverse of `encode`; an array of no dimension becomes a number."""
    match value:
        case {"__array__": list(values), "__type__": str(name)}:
            return np.array(values, np.dtype(name))
        case {"__array__": str(packed), "__type__": str(name), "__shape__": list(shape)}:
            unpacked = np.frombuffer(base64.b64decode(packed), np.dtype(name))
            return unpacked.reshape(shape).copy()
        case {"__tuple__": list(values)}:
            return tuple(decode(each) for each in values)
        case dict():
            return {name: decode(each) for name, each in value.items()}
        case list():
            return [decode(each) for each in value]
    return value


def is_kept(value: Any) -> bool:
    """Returns True if `encode` loses nothing of `value`."""
    match value:
        case None | bool() | int() | float() | str():
            return True
        case list() | tuple():
            return all(map(is_kept, value))
        case dict():
            return _has_names(value) and all(map(is_kept, value.values()))
    return _array(value) is not None


def _has_names(value: Mapping[Any, Any]) -> bool:
    return all(isinstance(name, str) and name not in _RESERVED for name in value)


def _array(value: Any) -> np.ndarray | None:
    """Returns numbers or truth values as an array; None for anything else."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        return None
    try:
        array = np.asarray(value)
    except Exception:  # noqa: BLE001 (a graph tensor, or anything else that imitates an array)
        return None
    return array if array.dtype.kind in "biuf" or array.dtype == ml_dtypes.bfloat16 else None
