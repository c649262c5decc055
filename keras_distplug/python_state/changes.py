"""Tracks changes in the values reachable from an object since training with it started.

The object may be a callback, a model or a data source. A `Policy` holds the differences.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import queue
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
import xxhash

from keras_distplug.python_state import (
    object_states,
    plain_values,
    random_states,
    walk,
)
from keras_distplug.python_state.walk import Attribute, Owners, Path, Place, Walked

# Tags that stand for a value in its saved form.
GENERATOR = "__generator__"
BAR = "__progress_bar__"  # position of a tqdm bar; the bar itself cannot be saved
DELETED = "__deleted__"
SAME = "__same__"  # identical with the object under another path
_FEW_CELLS = 100_000  # tables up to this size are read as a whole

_ERRORS = (LookupError, TypeError, ValueError, AttributeError)  # raised if values do not fit

Variables = Callable[[Any], list[Any] | None]


class GoneError(LookupError):
    """Raised if the owner of a value no longer exists."""


@dataclass(frozen=True)
class Value:
    """A value at some time.

    Args:
        kind: How it is saved: "plain", "variables", "generator", "bar", or "" if it cannot be.
        digest: Differs once the value has changed.
        encoded: The JSON-able form; None if the value cannot be saved.
        arrays: Arrays in it, by key; not copied.
    """

    kind: str
    digest: Any
    encoded: Any = None
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """A value when training started.

    Args:
        kind: As in `Value`; "absent" if it did not exist.
        digest: As in `Value`.
        number: The object's `id`.
        is_container: True if it can change in place.
        kept: The value itself, if it must be restored.
    """

    kind: str
    digest: Any
    number: int
    is_container: bool
    kept: Value | None


_ABSENT = Start("absent", None, 0, False, None)


@dataclass(frozen=True)
class Saved:
    """A value to restore.

    Args:
        path: Its path.
        encoded: The JSON-able value, or one of the tags above.
        arrays: Arrays in it, by key.
        is_same: True if it was still the initial object, changed in place.
    """

    path: Path
    encoded: Any
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    is_same: bool = True

    @property
    def is_reference(self) -> bool:
        return _is_marked(self.encoded, SAME)


@dataclass(frozen=True)
class Policy:
    """The differences between callbacks, models and data sources.

    Args:
        look: Returns the current `Value`.
        keeps: Returns True if an initial value is kept, to restore it if a checkpoint lacks it.
        variables: Returns a value's own variables; None if it cannot hold variables.
        is_ignored: Returns True if changes of a place are not state.
        is_assigned: Returns True if code that training calls assigns the path, so that an earlier
            training in this process has changed it.
        is_made: Returns True if only such code creates it.
    """

    look: Callable[[Any], Value]
    keeps: Callable[[Value], bool]
    variables: Variables = field(default=lambda value: None)
    is_ignored: Callable[[Place], bool] = field(default=lambda place: False)
    is_assigned: Callable[[Path], bool] = field(default=lambda path: True)
    is_made: Callable[[Path], bool] = field(default=lambda path: False)


class Changes:
    """The changes of one object since training started.

    Args:
        owner: The object.
        walk: Returns the values reachable from it, given the initial owners.
        policy: The policy for this kind of object.
    """

    def __init__(self, owner: Any, walk: Callable[[Owners], Walked], policy: Policy) -> None:
        self._owner = owner
        self._walk = walk
        self._policy = policy
        self.look = policy.look
        self.is_ignored = policy.is_ignored
        places, self.at_start = walk(Owners())
        starts = {place.path: self._start(place.value) for place in places}
        self.starts = _since_first(owner, starts, policy)

    def places(self) -> Walked:
        """Returns the values that are reachable from the object now, and their owners."""
        return self._walk(self.at_start)

    def find_changed(self, places: Iterable[Place]) -> Iterator[tuple[Place, Value, Start | None]]:
        """Yields those of `places` that have changed, with their current and initial values."""
        for place in places:
            if not self.is_ignored(place):
                value, start = self.look(place.value), self.starts.get(place.path)
                if start is None or start.digest != value.digest:
                    yield place, value, start

    def accept(self, place: Place, value: Value) -> None:
        """Makes a value the initial one, without keeping it."""
        self.starts[place.path] = Start(value.kind, value.digest, id(place.value), True, None)

    def is_same(self, place: Place) -> bool:
        """Returns True if a value is still the initial object."""
        start = self.starts.get(place.path)
        return start is not None and start.number == id(place.value)

    def restore(
        self, saved: Sequence[Saved], errors: tuple[type[Exception], ...] = _ERRORS
    ) -> list[Path]:
        """Restores values, and undoes other changes since the start, which an epoch that is
        repeated has made. Returns the paths of values that raised one of `errors`."""
        failed = []
        # References come last, once the objects that they refer to are restored.
        for refers in (False, True):
            chosen = [each for each in saved if each.is_reference == refers]
            if refers and not chosen:
                break
            found, owners = self.places()
            places = {place.path: place for place in found}
            for each in chosen:
                try:
                    self._restore_one(each, places, owners)
                except errors:
                    failed.append(each.path)
            if not refers:
                paths = {each.path for each in saved}
                self._undo(place for place in places.values() if place.path not in paths)
        return failed

    def _restore_one(self, saved: Saved, places: Mapping[Path, Place], owners: Owners) -> None:
        path, encoded, place = saved.path, saved.encoded, places.get(saved.path)
        if _is_marked(encoded, DELETED):
            if place is not None:
                delattr(self._owner, path[0])
        elif saved.is_reference:
            same = tuple(encoded[SAME])
            there = owners.at(same)
            value = places[same].value if there is None else there
            (_put_made(path, owners) if place is None else place.put)(value)
        elif _is_marked(encoded, BAR):
            # A bar that is created later starts at zero.
            if place is not None and _is_bar(place.value):
                bar = place.value  # its displayed rate is computed from this position
                bar.n = bar.last_print_n = bar.initial = encoded[BAR]
                bar.refresh()
        elif _is_marked(encoded, GENERATOR):
            if place is None or not random_states.is_generator(place.value):
                raise GoneError("it is not a generator")
            random_states.restore_generator(place.value, encoded[GENERATOR])
        elif place is None:
            _put_made(path, owners)(plain_values.decode(encoded, saved.arrays))
        else:
            value = plain_values.decode(encoded, saved.arrays)
            self._put(place, value, is_same=saved.is_same)

    def _put(self, place: Place, value: Any, *, is_same: bool) -> None:
        if (variables := self._policy.variables(place.value)) is not None:
            if isinstance(place.value, keras.Model) and len(value) > len(variables):
                with contextlib.suppress(Exception):  # missing variables are reported below
                    place.value.optimizer.build(place.value.trainable_variables)
                variables = self._policy.variables(place.value) or []
            if [each.shape for each in variables] != [each.shape for each in value]:
                raise LookupError("it has other variables")
            for variable, each in zip(variables, value, strict=True):
                variable.assign(each)
            return
        # Another object took its place; the initial one may be used elsewhere.
        put = plain_values.put if is_same else plain_values.replace
        made = put(place.value, value)
        if made is not place.value:
            try:
                place.put(made)
            except LookupError:
                if plain_values.put(place.value, value) is not place.value:
                    raise

    def _undo(self, places: Iterable[Place]) -> None:
        for place in places:
            start = self.starts.get(place.path)
            if start is _ABSENT and isinstance(place.put, Attribute):
                place.put.delete()
            elif (
                start is not None
                and start.kept is not None
                and not self.is_ignored(place)
                and self.look(place.value).digest != start.digest
            ):
                value = plain_values.decode(start.kept.encoded, start.kept.arrays)
                with contextlib.suppress(LookupError):
                    self._put(place, value, is_same=self.is_same(place))

    def _start(self, value: Any) -> Start:
        now, kept = self.look(value), None
        if self._policy.keeps(now):
            kept = replace(now, arrays={key: np.array(each) for key, each in now.arrays.items()})
        is_container = isinstance(value, walk.CONTAINERS)
        return Start(now.kind, now.digest, id(value), is_container, kept)


# What objects held when this process first trained with them, by `id`. An object whose training
# failed still has the values of that training. A checkpoint omits values that equal those at the
# start: that start is the first one, in this process or in an earlier one.
_firsts: dict[int, tuple[weakref.ref[Any], dict[Path, Start]]] = {}


def _since_first(owner: Any, starts: Mapping[Path, Start], policy: Policy) -> dict[Path, Start]:
    """Returns `starts`, with the first values in place of those that training has changed since."""
    number = id(owner)
    known = _firsts.get(number)
    if known is None or known[0]() is not owner:
        with contextlib.suppress(TypeError):  # an object with `__slots__`
            reference = weakref.ref(owner, lambda _: _firsts.pop(number, None))
            _firsts[number] = (reference, dict(starts))
        return dict(starts)
    firsts = known[1]
    found: dict[Path, Start] = {}
    for path, start in starts.items():
        first = firsts.get(path)
        if first is None:
            found[path] = _ABSENT if policy.is_made(path) else firsts.setdefault(path, start)
        else:
            is_same = first.is_container and first.number == start.number
            found[path] = first if is_same or policy.is_assigned(path) else start
    return found


def _put_made(path: Path, owners: Owners) -> Callable[[Any], None]:
    """Returns a function that creates a value that does not exist."""
    if path[:-1] not in owners.puts:
        raise GoneError(path)
    return owners.puts[path[:-1]](path[-1])


def _is_marked(encoded: Any, mark: str) -> bool:
    return isinstance(encoded, dict) and mark in encoded


def look(value: Any, variables: Variables = lambda value: None) -> Value:
    """Returns the current state of a value.

    Args:
        value: The value.
        variables: As in `Policy`.
    """
    if type(value) in (bool, int, str, type(None)):
        return Value("plain", (type(value), value), value)
    arrays: dict[str, np.ndarray] = {}
    try:
        kind, encoded = _encoded(value, variables, arrays)
        digest = xxhash.xxh3_64(json.dumps(encoded).encode())
    except Exception:  # noqa: BLE001 (it cannot be saved, or raises when inspected)
        return Value("", (type(value).__name__, id(value), _mark(value)))
    for array in arrays.values():
        mark = object_states.mark_of_array(array)
        digest.update(repr((array.shape, array.dtype, mark)).encode())
    return Value(kind, (kind, digest.intdigest()), encoded, arrays)


def _encoded(value: Any, variables: Variables, arrays: dict[str, np.ndarray]) -> tuple[str, Any]:
    if _is_bar(value):
        return "bar", {BAR: value.n}
    if random_states.is_generator(value):
        return "generator", {GENERATOR: random_states.encode_generator(value)}
    encoder = plain_values.Encoder(arrays, np.asarray)
    if (own := variables(value)) is not None:
        return "variables", encoder.encode(own, "")
    return "plain", encoder.encode(value, "")


def _is_bar(value: Any) -> bool:
    """Returns True if a value is a bar of tqdm, which is not a dependency."""
    tqdm = sys.modules.get("tqdm.std")
    return tqdm is not None and isinstance(value, tqdm.tqdm)


def _mark(value: Any) -> Any:
    """Differs once an unsavable object has changed in place, as far as that is cheap to see."""
    if isinstance(value, queue.Queue):
        return [id(each) for each in list(value.queue)]
    if isinstance(value, list | dict | set | tuple | collections.deque):
        return len(value)
    if type(value).__module__.split(".")[0] == "pandas":
        shape = getattr(value, "shape", ())
        with contextlib.suppress(Exception):  # an odd index, or entries that raise when shown
            if math.prod(shape) <= _FEW_CELLS:
                return xxhash.xxh3_64_intdigest(repr(value.to_dict()).encode())
        return shape
    return None
