"""Saves and restores, as JSON, the attributes of a user's object that change while it is read."""

from __future__ import annotations

import collections
import itertools
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import xxhash

from keras_distplug.python_state import json_values, plain_values, random_states

MOST_BYTES = 16 * 2**20  # largest array or list that is kept
SMALL_BYTES = 2**20  # up to this size, kept even if unchanged
_UNKNOWN_BYTES = 64  # assumed for an entry that JSON cannot hold
_SAMPLED_BYTES = 64 * 2**20  # of larger arrays, only parts are hashed
_PARTS, _PART_BYTES = 1024, 4096
_MOST_ENTRIES, _SAMPLE = 100_000, 100  # of lists and dicts
CONTAINERS = (list, tuple, set, frozenset, collections.deque, dict)
_PLAIN = frozenset({bool, int, float, str, type(None)})
_UNCHANGED = "__unchanged__"  # marks text, and lists of it, that has not changed
_CHANGED = object()


class Attributes:
    """The attributes of an object that decide its next output: numbers, text, arrays of numbers,
    lists and dicts of numbers and text, and random generators. Arrays and lists of more than 1 MB
    are kept only if they have changed. Tensors of torch are treated as arrays.

    Another thread may be changing the attributes.

    Args:
        owner: The object.
        others: Names of attributes that are not the object's own.
        only_generators: Skip arrays, lists and dicts, for an object that does not change them.
    """

    def __init__(
        self, owner: object, others: Collection[str] = (), *, only_generators: bool = False
    ) -> None:
        self._owner = owner
        self._others = frozenset(others)
        self._only_generators = only_generators
        self._marks = {
            name: _mark(value) for name, value in self._own() if _sum_bytes(value) > SMALL_BYTES
        }
        self._texts = {
            name: encode(value)
            for name, value in self._own()
            if name not in self._marks and any(_texts_in(value))
        }

    def read(self) -> dict[str, Any]:
        """Returns their values, JSON-able."""
        values = {
            name: encode(value)
            for name, value in self._own()
            if _sum_bytes(value) <= MOST_BYTES
            and (name not in self._marks or _mark(value) != self._marks[name])
        }
        # Text may be a path, which may differ in another process.
        return {
            name: {_UNCHANGED: value} if value == self._texts.get(name, _CHANGED) else value
            for name, value in values.items()
            if not isinstance(value, str) or value != self._texts.get(name)
        }

    def assign(self, values: Mapping[str, Any], *, in_pass: bool = False) -> None:
        """Restores the values from `read`; in place if other objects may refer to them."""
        for name, value in values.items():
            there = getattr(self._owner, name, None)
            made = put(there, value)
            if made is not there:
                setattr(self._owner, name, made)

    def names(self) -> set[str]:
        """Returns the names of these and of the attributes that are not the object's own."""
        return {name for name, _ in self._own()} | self._others

    def generators(self) -> list[Any]:
        """Returns the states of the random generators among them."""
        return [encode(value) for _, value in self._own() if random_states.is_generator(value)]

    def too_large(self) -> list[str]:
        """Returns the names of changed arrays and lists that are too large to keep."""
        return [
            name
            for name, value in self._own()
            if _sum_bytes(value) > MOST_BYTES and _mark(value) != self._marks.get(name)
        ]

    def _own(self) -> list[tuple[str, Any]]:
        own = sorted(vars(self._owner).items())
        return [
            (name, value)
            for name, value in ((name, _torch_as_array(value)) for name, value in own)
            if name not in self._others
            and (
                random_states.is_generator(value)
                or (isinstance(value, bool | int | float | str) and json_values.is_kept(value))
                or (not self._only_generators and _may_change(value))
            )
        ]


def _torch_as_array(value: Any) -> Any:
    """Returns the memory of a tensor as an array, and any other value unchanged."""
    torch = random_states.imported_torch()
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    try:
        return value.numpy()
    except (TypeError, RuntimeError):  # on another device, or of a type that NumPy lacks
        return value


def _may_change(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf" and value.flags.writeable
    if isinstance(value, dict):
        return len(value) <= _MOST_ENTRIES and _is_plain(value.copy())
    return isinstance(value, list) and (len(value) > _MOST_ENTRIES or _is_plain(value.copy()))


def _is_plain(value: list[Any] | dict[Any, Any]) -> bool:
    """True for numbers and text, and lists and tuples of these; not for arrays of unknown size."""
    parts = list(value.values()) if isinstance(value, dict) else value
    if set(map(type, parts)) <= _PLAIN:
        return json_values.is_kept(value) if isinstance(value, dict) else True
    nested = [each for each in parts if isinstance(each, list | tuple)]
    return json_values.is_kept(value) and all(set(map(type, each)) <= _PLAIN for each in nested)


def _texts_in(value: Any) -> Iterator[str]:
    """Yields the text in a value, and in lists and dicts within it."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in list(value.values()) if isinstance(value, dict) else value:
            yield from _texts_in(each)


def _sum_bytes(value: Any) -> int:
    """Returns `count_bytes`, or 0 for dicts, which are always kept."""
    return 0 if isinstance(value, dict) else count_bytes(value)


def count_bytes(value: Any) -> int:
    """Returns the size of an array, or the approximate size of a container's JSON."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if not isinstance(value, CONTAINERS) or not value:
        return 0
    entries = value.values() if isinstance(value, dict) else value
    some = list(itertools.islice(entries, _SAMPLE))
    return sum(map(_bytes_of_entry, some)) * len(value) // len(some)


def _bytes_of_entry(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    try:
        return len(json.dumps(value, default=str)) + 2
    except Exception:  # noqa: BLE001 (keys that JSON lacks, a cycle, an odd `__str__`, ...)
        return _UNKNOWN_BYTES


def _mark(value: np.ndarray | list[Any]) -> int:
    """Returns a value that differs once an array has changed, or a list holds other entries."""
    return mark_of_entries(value) if isinstance(value, list) else mark_of_array(value)


def mark_of_entries(container: Any) -> int:
    """Returns a value that differs once a container holds other entries, or in another order."""
    return hash(tuple(map(id, list(container))))


def mark_of_array(array: np.ndarray) -> int:
    """Returns a value that differs once an array has changed; large arrays are hashed in parts."""
    in_one_piece = array.flags.c_contiguous or array.flags.f_contiguous
    if array.nbytes > _SAMPLED_BYTES and not in_one_piece:
        return 0  # hashing would copy it
    flat = array.ravel(order="K").view(np.uint8)
    if flat.nbytes <= _SAMPLED_BYTES:
        return xxhash.xxh3_64_intdigest(flat.data)
    digest = xxhash.xxh3_64()
    for start in np.linspace(0, flat.nbytes - _PART_BYTES, _PARTS).astype(int):
        digest.update(flat[start : start + _PART_BYTES].data)
    return digest.intdigest()


def encode(value: Any) -> Any:
    """Returns the state of a random generator, or any other value, as JSON."""
    if random_states.is_generator(value):
        return random_states.encode_generator(value)
    return json_values.encode(value)


def put(there: Any, value: Any) -> Any:
    """Returns the `value` before `encode`: `there` itself, if that can be made equal to it. An
    unchanged value is only brought into the same order, or left alone if it holds other text."""
    if isinstance(value, dict) and _UNCHANGED in value:
        value = value[_UNCHANGED]
        if sorted(_texts_in(json_values.decode(value))) != sorted(_texts_in(there)):
            return there
    if isinstance(value, dict) and random_states.is_generator(there):
        random_states.restore_generator(there, value)
        return there
    array = _torch_as_array(there)
    made = plain_values.put(array, json_values.decode(value))
    return there if made is array else made
