"""Conversion of a batch of data to named arrays, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PARTS = ("x", "y", "sample_weight")


def split_batch(batch: Any) -> tuple[Any, dict[str, Any]]:
    """Splits `batch` into its structure and its arrays.

    The arrays are named like the arguments of Keras' steps, `x`, `y` and `sample_weight`, or by
    paths that start with these, such as `x/image`.

    Args:
        batch: Arrays and None, in tuples, lists and dictionaries with string keys.

    Returns:
        The structure for `join_batch`, as JSON-serializable values, and the arrays by name.

    Raises:
        TypeError: If the batch has any other structure.
    """
    arrays: dict[str, Any] = {}
    if isinstance(batch, tuple) and 1 <= len(batch) <= len(_PARTS):
        parts = zip(_PARTS, batch, strict=False)
        return {"tuple": [_part(each, name, arrays) for name, each in parts]}, arrays
    return _part(batch, _PARTS[0], arrays), arrays


def _part(value: Any, name: str, arrays: dict[str, Any]) -> Any:
    if value is None:
        return None
    if isinstance(value, Mapping):
        if strange := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"Expected string keys in `{name}`. Received: {strange[0]!r}")
        return {"dict": {key: _part(each, f"{name}/{key}", arrays) for key, each in value.items()}}
    if type(value) in (tuple, list):
        parts = [_part(each, f"{name}/{place}", arrays) for place, each in enumerate(value)]
        return {type(value).__name__: parts}
    if not hasattr(value, "dtype"):
        raise TypeError(
            f"Expected `{name}` to be an array, or a tuple, list or dictionary of arrays. "
            f"Received: a value of type {type(value).__name__}"
        )
    while name in arrays:  # keys that contain `/` may lead to the same path
        name += "'"
    arrays[name] = value
    return {"array": name}


def join_batch(structure: Any, arrays: Mapping[str, Any]) -> Any:
    """Rebuilds a batch, the inverse of `split_batch`."""
    if structure is None:
        return None
    ((kind, parts),) = structure.items()
    if kind == "array":
        return arrays[parts]
    if kind == "dict":
        return {key: join_batch(each, arrays) for key, each in parts.items()}
    made = [join_batch(each, arrays) for each in parts]
    return tuple(made) if kind == "tuple" else made
