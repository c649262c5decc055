"""Saves and restores, as JSON, the changing objects that a user's data source refers to.

Examples are an augmenter with its own generator, a replay buffer, a counter in a class, a generator
of the script's module. Most of the source's own attributes are in `object_states.Attributes`.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from keras_distplug.core.log import announce
from keras_distplug.python_state import (
    changes,
    json_values,
    object_states,
    random_states,
    script_code,
    walk,
)
from keras_distplug.python_state.changes import Changes, GoneError, Policy, Saved, Value
from keras_distplug.python_state.object_states import Attributes
from keras_distplug.python_state.walk import Owners, Path, Place, Walked

_SAMPLE = 100  # entries of a container that are inspected
_GENERATOR, _VALUE, _ARRAYS = "generator", "value", "arrays"
_SINGLE = (bool, int, float, str, type(None), np.generic)
_LAZY = (list, dict, np.ndarray)  # often read from a file on first use


class ReachableState:
    """The state reachable from objects and functions: objects of the script among their attributes,
    their classes, and variables that their functions enclose or refer to as globals. Kept are
    random generators, and numbers, text, arrays, and containers of these that have changed.

    Another thread may be changing them.

    Args:
        owner: The source.
        roots: The source and its parts, by the first part of their paths.
        attributes: The attributes of `roots`, which are saved elsewhere.
    """

    def __init__(
        self, owner: Any, roots: Mapping[str, Any], attributes: Mapping[str, Attributes]
    ) -> None:
        self._owner = owner
        self._roots = roots
        self._attributes = attributes
        self._reported: set[Path] = set()
        self._changes = Changes(owner, self._walk, Policy(_look, _is_small))

    def warnings(self) -> list[str]:
        """Returns messages for the user about state that is sure to be lost."""
        return [
            f"{type(self._owner).__name__}: `{walk.get_title(place.path[1:])}` is an "
            "iterator, whose position cannot be saved: a restarted run reads it from its start. "
            "Keep the number of the next element instead"
            for place in walk.from_objects(self._roots)[0]
            if isinstance(place.value, Iterator)
            and not isinstance(place.value, io.IOBase)
            and script_code.is_of_script(type(self._roots[place.path[0]]))
        ]

    def read(self) -> list[Any]:
        """Returns paths and values, JSON-able."""
        found: list[Any] = []
        others = []
        for place in self._changes.places()[0]:
            if random_states.is_generator(place.value):
                state = random_states.encode_generator(place.value)
                found.append([place.path, {_GENERATOR: state}])
            else:
                others.append(place)
        for place, value, start in self._changes.find_changed(others):
            if isinstance(place.value, _LAZY) and (start is None or start.digest == _NONE.digest):
                self._changes.accept(place, value)
            elif (encoded := _encoded(place.value, value)) is not None:
                found.append([place.path, encoded])
            elif not isinstance(place.value, dict):
                self._report(place)
        return found

    def assign(self, values: Sequence[Any], *, in_pass: bool = False) -> None:
        """Restores the values from `read`; in place if other objects may refer to them."""
        self._changes.restore([_saved(tuple(path), each) for path, each in values], (GoneError,))

    def _walk(self, at_start: Owners) -> Walked:
        others = {(name, each) for name, part in self._attributes.items() for each in part.names()}
        places, owners = walk.from_objects(self._roots)
        return [
            place
            for place in places
            if place.path not in others
            and (random_states.is_generator(place.value) or _may_change(place.value))
        ], owners

    def _report(self, place: Place) -> None:
        if place.path not in self._reported:
            self._reported.add(place.path)
            title = walk.get_title(place.path[1:])
            announce(
                f"{type(self._owner).__name__}: `{title}` ({type(place.value).__name__}) changes "
                "while batches are made and cannot be saved, so a resumed run starts with "
                "its initial value. Store only numbers, text and arrays of up to 16 MB in it, such "
                "as an array of indices"
            )


def _may_change(value: Any) -> bool:
    """Returns True if a value may be state: not a file, a model, or a cache of data read."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf" and value.flags.writeable
    if isinstance(value, dict):
        some = list(itertools.islice(value.values(), _SAMPLE))
        return all(isinstance(each, (*_SINGLE, list, tuple)) for each in some)
    return isinstance(value, (*_SINGLE, *object_states.CONTAINERS))


def _look(value: Any) -> Value:
    """Does the same as `changes.look`; a container that is large or cannot be saved is compared by
    its entries' identity."""
    is_container = isinstance(value, object_states.CONTAINERS)
    if not is_container or object_states.count_bytes(value) <= object_states.SMALL_BYTES:
        value_now = changes.look(value)
        if value_now.kind or not is_container:
            return value_now
    return Value("", object_states.mark_of_entries(value))


_NONE = _look(None)


def _is_small(value: Value) -> bool:
    size = sum(each.nbytes for each in value.arrays.values())
    return value.kind == "plain" and size <= object_states.SMALL_BYTES


def _encoded(value: Any, value_now: Value) -> Any:
    """Returns the value as JSON; None if JSON cannot hold it."""
    if object_states.count_bytes(value) > object_states.MOST_BYTES:
        return None
    value_now = value_now if value_now.kind else changes.look(value)  # for a large container
    if value_now.kind != "plain" or not json_values.is_kept(value_now.arrays):
        return None
    return {_VALUE: value_now.encoded, _ARRAYS: json_values.encode(value_now.arrays)}


def _saved(path: Path, value: Mapping[str, Any]) -> Saved:
    if _GENERATOR in value:
        return Saved(path, {changes.GENERATOR: value[_GENERATOR]})
    return Saved(path, value[_VALUE], json_values.decode(value[_ARRAYS]))
