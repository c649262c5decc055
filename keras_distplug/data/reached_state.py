"""What changes in what a data source of the user's leads to, as JSON, and back.

That is an augmenter with a generator of its own, a replay buffer, a counter in a class, a generator
of the script's module. Most of the source's own attributes are in `object_states.Attributes`.
"""

from __future__ import annotations

import collections
import contextlib
import io
import itertools
import json
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from keras_distplug.core.log import announce
from keras_distplug.python_state import json_values, object_states, plain_values, walk
from keras_distplug.python_state.walk import Owners, Path, Place

_MOST_BYTES = 16 * 2**20  # of a value that is kept
_SMALL_BYTES = 2**20  # of one that is compared by its content
_UNKNOWN_BYTES = 64  # of an entry that JSON cannot hold
_SAMPLE = 100  # entries of a container that are looked at
_GENERATOR, _VALUE, _ARRAYS = "generator", "value", "arrays"
_SINGLE = (bool, int, float, str, type(None), np.generic)
_LAZY = (list, dict, np.ndarray)  # what is often read from a file when it is needed first
_CONTAINERS = (list, tuple, set, frozenset, collections.deque, dict)


@dataclass(frozen=True)
class _Start:
    """A value when the source was made.

    Args:
        digest: Another one once the value has changed.
        encoded: The value, of a small one.
        is_none: Whether there was none.
    """

    digest: Any
    encoded: Any
    is_none: bool


# By `id` of the owner. A source that is read again, after a failure, has changed since.
_firsts: dict[int, tuple[weakref.ref[Any], dict[Path, _Start]]] = {}


class Reached:
    """What objects and functions lead to: objects of the script among their attributes, their
    classes, and what their functions enclose or refer to as globals. Random generators are kept,
    and numbers, text, arrays, and containers of these that have changed.

    Another thread may be changing them.

    Args:
        owner: The source.
        roots: It and its parts, by the first part of their paths.
        others: Returns paths of attributes that are kept elsewhere.
    """

    def __init__(
        self, owner: Any, roots: Mapping[str, Any], others: Callable[[], Collection[Path]]
    ) -> None:
        self._owner = owner
        self._roots = roots
        self._others = others
        self._told: set[Path] = set()
        self._starts = _first_of(
            owner,
            {
                place.path: _start(place.value)
                for place in self._places()
                if not object_states.is_generator(place.value)
            },
        )

    def warnings(self) -> list[str]:
        """Lines for people on what is known to be lost before a batch is made."""
        return [
            f"{type(self._owner).__name__}: `{walk.title_of(place.path[1:])}` is an "
            "iterator, whose position cannot be saved: a restarted run reads it from its start. "
            "Keep the number of the next element instead"
            for place in walk.places_behind(self._roots, Owners())
            if isinstance(place.value, Iterator)
            and not isinstance(place.value, io.IOBase)
            and walk.is_of_script(type(self._roots[place.path[0]]))
        ]

    def read(self) -> list[Any]:
        """Paths and values, JSON-able."""
        found: list[Any] = []
        for place in self._places():
            if object_states.is_generator(place.value):
                found.append([place.path, {_GENERATOR: object_states.encode(place.value)}])
                continue
            start, digest = self._starts.get(place.path), _digest(place.value)
            if start is not None and start.digest == digest:
                continue
            if isinstance(place.value, _LAZY) and (start is None or start.is_none):
                self._starts[place.path] = _Start(digest, None, is_none=False)
            elif (encoded := _encoded(place.value)) is not None:
                found.append([place.path, encoded])
            elif not isinstance(place.value, dict):
                self._tell(place)
        return found

    def assign(self, values: Sequence[Any], *, in_pass: bool = False) -> None:
        """Puts back what `read` gave; in place, where others may refer to it."""
        owners = Owners()
        places = {place.path: place for place in self._places(owners)}
        for path, value in ((tuple(each), value) for each, value in values):
            place = places.pop(path, None)
            if _GENERATOR in value:
                if place is not None and object_states.is_generator(place.value):
                    object_states.put(place.value, value[_GENERATOR])
            elif place is not None:
                _put(place, value)
            elif (setter := owners.setters.get(path[:-1])) is not None:
                setter(path[-1], _decoded(value))
        for path, place in places.items():
            start = self._starts.get(path)
            is_generator = object_states.is_generator(place.value)
            if start is None or start.encoded is None or is_generator:
                continue
            if start.digest != _digest(place.value):
                _put(place, start.encoded)

    def _places(self, owners: Owners | None = None) -> list[Place]:
        others = self._others()
        return [
            place
            for place in walk.places_behind(self._roots, owners or Owners())
            if place.path not in others
            and (object_states.is_generator(place.value) or _may_change(place.value))
        ]

    def _tell(self, place: Place) -> None:
        if place.path not in self._told:
            self._told.add(place.path)
            title = walk.title_of(place.path[1:])
            announce(
                f"{type(self._owner).__name__}: `{title}` ({type(place.value).__name__}) changes "
                "while batches are made and cannot be saved, so a restart begins without it. Keep "
                "numbers, text and arrays of up to 16 MB there, such as an array of indices"
            )


def _first_of(owner: Any, starts: dict[Path, _Start]) -> dict[Path, _Start]:
    """The starts of when this process read an object first."""
    number = id(owner)
    known = _firsts.get(number)
    if known is not None and known[0]() is owner:
        return {**starts, **known[1]}
    with contextlib.suppress(TypeError):  # it has `__slots__`
        _firsts[number] = weakref.ref(owner, lambda _: _firsts.pop(number, None)), starts
    return dict(starts)


def _start(value: Any) -> _Start:
    encoded = _encoded(value) if _bytes_of(value) <= _SMALL_BYTES else None
    return _Start(_digest(value), encoded, is_none=value is None)


def _may_change(value: Any) -> bool:
    """Whether a value may be state: no file, no model, and no cache of what was read."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf" and value.flags.writeable
    if isinstance(value, dict):
        some = list(itertools.islice(value.values(), _SAMPLE))
        return all(isinstance(each, (*_SINGLE, list, tuple)) for each in some)
    return isinstance(value, (*_SINGLE, *_CONTAINERS))


def _bytes_of(value: Any) -> int:
    """Of an array; of a container about as many as its JSON has."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if not isinstance(value, _CONTAINERS) or not value:
        return 0
    entries = value.values() if isinstance(value, dict) else value
    some = list(itertools.islice(entries, _SAMPLE))
    return sum(map(_bytes_of_one, some)) * len(value) // len(some)


def _bytes_of_one(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    try:
        return len(json.dumps(value, default=str))
    except Exception:  # noqa: BLE001 (keys that JSON has not, a cycle, an odd `__str__`, ...)
        return _UNKNOWN_BYTES


def _digest(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype, object_states.mark_of_array(value)
    if not isinstance(value, _CONTAINERS):
        return type(value), value
    if _bytes_of(value) <= _SMALL_BYTES and (encoded := _encoded(value)) is not None:
        return xxhash.xxh3_64_intdigest(json.dumps(encoded))
    return hash(tuple(map(id, list(value))))


def _encoded(value: Any) -> Any:
    """As JSON; None if that cannot hold it."""
    if _bytes_of(value) > _MOST_BYTES:
        return None
    arrays: dict[str, np.ndarray] = {}
    try:
        encoded = plain_values.Encoder(arrays).encode(value, "")
    except Exception:  # noqa: BLE001 (objects of the user's must not end training)
        return None
    if not json_values.is_kept(arrays):
        return None
    return {_VALUE: encoded, _ARRAYS: json_values.encode(arrays)}


def _decoded(value: Mapping[str, Any]) -> Any:
    return plain_values.decode(value[_VALUE], json_values.decode(value[_ARRAYS]))


def _put(place: Place, value: Mapping[str, Any]) -> None:
    made = plain_values.put(place.value, _decoded(value))
    if made is not place.value:
        place.put(made)
