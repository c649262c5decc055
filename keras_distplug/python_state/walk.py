"""Finds the values that the code of a callback can change, and how to replace them.

These are attributes of a callback, of its class, and of the script's own objects that it refers
to, variables enclosed by its functions, and globals that they may change.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import datetime
import enum
import functools
import json
import operator
import pathlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_distplug.backend.tensorflow.runtime import keras_callbacks, models
from keras_distplug.python_state import random_states, script_code
from keras_distplug.python_state.script_code import is_of_script

Path = tuple[str, ...]
Put = Callable[[str], Callable[[Any], None]]

_MOST_OBJECTS = 20_000
_MOST_REACHABLE = 2_000  # objects reachable from one of the script's, which may be its samples
_OF_EVERY_PART = frozenset({"built", "name", "trainable", "dtype_policy"})
_NUMBERS_AND_TEXT = frozenset({bool, int, float, str, type(None)})
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
CONTAINERS = (list, dict, set, collections.deque, np.ndarray)
_NO_STATE = (types.ModuleType, types.BuiltinFunctionType, np.ufunc)


@dataclass(frozen=True)
class Attribute:
    """Sets or deletes an attribute.

    Args:
        owner: The object with the attribute.
        name: Its name.
        assign: `setattr`, or `object.__setattr__`.
    """

    owner: Any
    name: str
    assign: Callable[[Any, str, Any], None] = setattr

    def __call__(self, value: Any) -> None:
        self.assign(self.owner, self.name, value)

    @property
    def has_default(self) -> bool:
        """True if its class has an attribute of that name, which is read once this is deleted."""
        return hasattr(type(self.owner), self.name)

    def delete(self) -> None:
        delattr(self.owner, self.name)


@dataclass(frozen=True)
class Owners:
    """Objects and containers on the way to values.

    Args:
        puts: By path, a function that returns the setter of an attribute or entry by its name.
        objects: By `id`, an object's path, and the object.
    """

    puts: dict[Path, Put] = field(default_factory=dict)
    objects: dict[int, tuple[Path, Any]] = field(default_factory=dict)

    def at(self, path: Path) -> Any:
        """Returns the object with that path, or None."""
        return next((each for there, each in self.objects.values() if there == path), None)


@dataclass(frozen=True)
class Place:
    """A value that a callback can reach.

    Args:
        path: Its path, which is the same in another process.
        value: The value.
        put: Replaces it.
        is_global: True if it is reached through a global variable.
        same_as: The object's other path, if it was already found under one.
    """

    path: Path
    value: Any
    put: Callable[[Any], None]
    is_global: bool = False
    same_as: Path | None = None


Walked = tuple[list[Place], Owners]  # the values, and their owners


def get_title(path: Path) -> str:
    """Returns the path of a value as it is written in the script: `meter.total`."""
    return ".".join(part for part in path if not part.startswith("<"))


def from_callback(
    callback: keras.callbacks.Callback, closed: Sequence[Any], at_start: Owners
) -> Walked:
    """Returns the values that `callback` can reach.

    Args:
        callback: The callback. Attributes that Keras' own classes set are skipped.
        closed: Objects whose attributes are not visited.
        at_start: The owners when training started; objects keep their path from then.
    """
    walk = _Walk([*closed, callback], at_start)
    own = script_code.attributes_set_by_script([callback])
    others = script_code.attributes_set_by_script(
        each for each in closed if isinstance(each, keras.callbacks.Callback)
    )
    others -= set(keras_callbacks.get_attributes(callback))  # these are saved anyway
    hidden = script_code.attributes_set_by_library(type(callback))
    hidden -= (own | others) - script_code.OF_EVERY_CALLBACK
    return walk.all_of(walk.from_object(callback, (), hidden))


def from_objects(roots: Mapping[str, Any]) -> Walked:
    """Returns the values that objects and functions of the script can reach, as for a callback.

    Args:
        roots: The objects and functions, by the first part of their paths.
    """
    walk = _Walk([], Owners(), most_objects=_MOST_REACHABLE)
    return walk.all_of(
        place for name, root in roots.items() for place in walk.from_root((name,), root)
    )


def from_model(
    model: keras.Model,
    callbacks: Sequence[keras.callbacks.Callback],
    at_start: Owners,
    *,
    includes_own_code: bool,
) -> Walked:
    """Returns the attributes of a model, its layers, metrics, loss and optimizer that code of the
    script sets: the callbacks' or their own. Variables are skipped.

    Args:
        model: The model. Attributes that Keras sets itself are skipped.
        callbacks: The callbacks.
        at_start: As for `from_callback`.
        includes_own_code: True to include attributes set by the parts' own code.
    """
    parts: dict[Path, Any] = {(): model, ("loss",): model.loss, ("optimizer",): model.optimizer}
    for place, layer in models.layers_by_place(model).items():
        parts["layers", place] = layer
    for number, metric in enumerate(models.list_metrics(model)):
        parts["metrics", str(number)] = metric
    walk = _Walk([*parts.values(), *callbacks], at_start)
    by_callbacks = script_code.attributes_set_by_script(callbacks)

    def found() -> Iterator[Place]:
        for path, owner in parts.items():
            if isinstance(owner, _FUNCTIONS) and includes_own_code:
                yield from walk.from_function(owner, path)
            if not isinstance(owner, keras.Layer | keras.Metric | keras.Loss | keras.Optimizer):
                continue
            walk.owners.puts[path] = functools.partial(Attribute, owner)
            of_keras = script_code.attributes_set_by_library(type(owner))
            names = by_callbacks - (of_keras if owner is model else _OF_EVERY_PART)
            if includes_own_code and is_of_script(type(owner)):
                names |= script_code.attributes_set_by_script([owner]) - of_keras
                for kind in filter(is_of_script, type(owner).__mro__):
                    yield from walk.from_class(kind, path)
            for name, value in script_code.attributes(owner) if names else ():
                if name in names and not _has_variables(value):
                    yield from walk.from_value(Place((*path, name), value, Attribute(owner, name)))

    return walk.all_of(found())


def _has_variables(value: Any) -> bool:
    """Returns True if a value is a variable, or directly holds variables."""
    entries = value.values() if isinstance(value, dict) else value
    return list_variables(value) is not None or any(
        isinstance(each, keras.Variable | tf.Variable)
        for each in (value, *(entries if isinstance(value, dict | list | tuple) else ()))
    )


def list_variables(value: Any) -> list[Any] | None:
    """Returns the variables of an object of Keras or TensorFlow; None for other objects."""
    if isinstance(value, keras.random.SeedGenerator | tf.random.Generator):
        return [value.state]
    kinds = (keras.Layer, keras.metrics.Metric, keras.optimizers.Optimizer, tf.Module)
    if isinstance(value, kinds) and not isinstance(value, tf.Variable):
        optimizer = getattr(value, "optimizer", None) if isinstance(value, keras.Model) else None
        return [*value.variables, *(optimizer.variables if optimizer is not None else ())]
    return None


class _Walk:
    """Visits every object once.

    Args:
        closed: Objects whose attributes are not visited.
        at_start: As for `from_callback`.
        most_objects: Largest number of objects to visit.
    """

    def __init__(
        self, closed: Sequence[Any], at_start: Owners, most_objects: int = _MOST_OBJECTS
    ) -> None:
        self.owners = Owners()
        self._most_objects = most_objects
        self._seen: dict[int, Any] = {id(each): each for each in closed}  # keeps ids valid
        self._at_start = at_start
        self._postponed: list[Place] = []  # objects met away from their own path

    def all_of(self, found: Iterable[Place]) -> Walked:
        """Returns the values found, including those in objects that were met away from their
        initial path."""
        places = list(found)
        while self._postponed:
            postponed, self._postponed = self._postponed, []
            for each in postponed:
                if id(each.value) in self.owners.objects:
                    path, _ = self.owners.objects[id(each.value)]
                    places.append(dataclasses.replace(each, same_as=path))
                elif self._is_new(each.value):
                    places += self.from_object(each.value, each.path, is_global=each.is_global)
        return places, self.owners

    def from_root(self, path: Path, root: Any) -> Iterator[Place]:
        if self._is_new(root):
            look_into = self.from_function if isinstance(root, _FUNCTIONS) else self.from_object
            yield from look_into(root, path)

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen or len(self._seen) > self._most_objects:
            return False
        self._seen[id(value)] = value
        return True

    def from_value(self, place: Place, *, is_hidden: bool = False) -> Iterator[Place]:
        """Yields the values in a container or object; any other value itself, unless `is_hidden`.
        Stops at an object that raises errors when inspected."""
        with contextlib.suppress(Exception):
            yield from self._look_into(place, is_hidden)

    def _look_into(self, place: Place, is_hidden: bool) -> Iterator[Place]:
        path, value, is_global = place.path, place.value, place.is_global
        if isinstance(value, type):
            if is_of_script(value):
                yield from self.from_class(value, path)
        elif isinstance(value, _NO_STATE):
            return
        elif isinstance(value, _FUNCTIONS):
            if self._is_new(value):
                yield from self.from_function(value, path)
        elif isinstance(value, keras.callbacks.Callback):
            if self._is_new(value):
                hidden = script_code.attributes_set_by_library(type(value))
                yield from self.from_object(
                    value, path, hidden - {*keras_callbacks.get_attributes(value)}
                )
        elif _is_object(value):
            known, _ = self._at_start.objects.get(id(value), (path, None))
            if id(value) in self.owners.objects or known != path:
                self._postponed.append(place)
            elif self._is_new(value):
                yield from self.from_object(value, path, is_global=is_global)
        elif _has_objects(value):
            if self._is_new(value):
                yield from self._entries(place, is_hidden)
        elif not is_hidden:
            yield place

    def from_object(
        self, owner: Any, path: Path, hidden: Set[str] = frozenset(), *, is_global: bool = False
    ) -> Iterator[Place]:
        put = functools.partial(Attribute, owner, assign=object.__setattr__)
        self.owners.puts[path] = put
        self.owners.objects[id(owner)] = (path, owner)
        for name, value in script_code.attributes(owner):
            if not name.startswith("__"):
                place = Place((*path, name), value, put(name), is_global)
                yield from self.from_value(place, is_hidden=name in hidden)
        for kind in type(owner).__mro__:
            is_own = kind is type(owner) and not script_code.is_of_library(kind)
            if is_own or is_of_script(kind):
                yield from self.from_class(kind, path)

    def from_class(self, kind: type, path: Path, name: str = "") -> Iterator[Place]:
        """Yields values in a script's class, known as `name`, and those its functions refer to."""
        if not self._is_new(kind):
            return
        path = (*path, f"<class {name or kind.__name__}>")
        self.owners.puts[path] = put = functools.partial(Attribute, kind)
        for name, value in list(vars(kind).items()):
            value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            value = value.fget if isinstance(value, property) else value
            is_special = name.startswith("__") and not isinstance(value, types.FunctionType)
            if not is_special and not isinstance(value, types.MemberDescriptorType):
                yield from self._parts(path, {name: value}, put)

    def _entries(self, place: Place, is_hidden: bool) -> Iterator[Place]:
        value = place.value

        def put(name: str) -> Callable[[Any], None]:
            return functools.partial(operator.setitem, value, json.loads(name))

        self.owners.puts[place.path] = put
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        parts = {json.dumps(k): each for k, each in list(entries) if type(k) in (str, int)}
        yield from self._parts(
            place.path, parts, put, is_global=place.is_global, is_hidden=is_hidden
        )

    def _parts(
        self,
        path: Path,
        parts: Mapping[str, Any],
        put: Put = lambda name: _refuse,
        *,
        is_global: bool = False,
        is_hidden: bool = False,
    ) -> Iterator[Place]:
        for name, part in parts.items():
            place = Place((*path, name), part, put(name), is_global)
            yield from self.from_value(place, is_hidden=is_hidden)

    def from_function(self, value: Any, path: Path) -> Iterator[Place]:
        if isinstance(value, types.MethodType):
            parts = {"<self>": value.__self__, "<function>": value.__func__}
            yield from self._parts(path, parts)
        elif isinstance(value, functools.partial):
            parts = {"<func>": value.func, "<args>": value.args, "<keywords>": value.keywords}
            yield from self._parts(path, parts)
        elif script_code.is_function_of_script(value):
            yield from self._enclosed(value, path)
            defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            kept = {
                str(number): each
                for number, each in enumerate(defaults)
                if isinstance(each, list | dict | set) or _may_hold_state(each)
            }
            yield from self._parts((*path, "<defaults>"), kept)
            put = functools.partial(Attribute, value)
            yield from self._parts(path, vars(value), put)
            yield from self._globals(value, path)

    def _enclosed(self, function: types.FunctionType, path: Path) -> Iterator[Place]:
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                if self._is_new(cell):
                    put = functools.partial(setattr, cell, "cell_contents")
                    place = Place((*path, "<closure>", name), cell.cell_contents, put)
                    yield from self.from_value(place)

    def _globals(self, function: types.FunctionType, path: Path) -> Iterator[Place]:
        named = function.__globals__
        path = (*path, "<global>")
        assigned = script_code.stored(function.__code__, "STORE_GLOBAL")
        mentioned = dict.fromkeys(script_code.mentioned_names(function.__code__))
        for name in mentioned:
            value = named.get(name)
            if isinstance(value, type):
                if is_of_script(value):
                    yield from self.from_class(value, (*path, name), name)
            elif isinstance(value, types.ModuleType):
                if script_code.is_file_of_script(getattr(value, "__file__", None)):
                    there = {each: vars(value)[each] for each in mentioned if each in vars(value)}
                    put = functools.partial(Attribute, value)
                    yield from self._parts((*path, name), there, put, is_global=True)
            elif name in assigned or isinstance(value, CONTAINERS) or _may_hold_state(value):
                put_one = functools.partial(named.__setitem__, name)
                yield from self.from_value(Place((*path, name), value, put_one, is_global=True))


def _refuse(value: Any) -> None:
    raise LookupError("it cannot be replaced")


def _is_object(value: Any) -> bool:
    """Returns True if a value is an object whose attributes the script defines."""
    kind = type(value)
    if kind in (types.SimpleNamespace, argparse.Namespace):
        return True
    no_object = (BaseException, enum.Enum, tuple, list, dict, set, np.ndarray, keras.Variable)
    return is_of_script(kind) and not isinstance(value, no_object) and list_variables(value) is None


def _may_hold_state(value: Any) -> bool:
    """Returns True if a value other than a number, text or array may hold state."""
    is_function = isinstance(value, types.FunctionType | functools.partial)
    return (
        is_function
        or isinstance(value, keras.callbacks.Callback | keras.Variable | tf.Variable)
        or random_states.is_generator(value)
        or _is_object(value)
        or list_variables(value) is not None
    )


def _has_objects(value: Any, depth: int = 4) -> bool:
    """Returns True if entries of a container may lead to state."""
    is_container = isinstance(value, dict | list | tuple | collections.deque)
    if not is_container or len(value) > _MOST_OBJECTS or not depth:
        return False
    entries = list(value.values()) if isinstance(value, dict) else list(value)
    if set(map(type, entries)) <= _NUMBERS_AND_TEXT:
        return False
    return any(_needs_visit(each) or _has_objects(each, depth - 1) for each in entries)


def _needs_visit(value: Any) -> bool:
    """Returns True if an entry prevents its container from being saved as a whole."""
    if isinstance(value, keras.Variable | tf.Variable | tf.Tensor | np.ndarray | np.generic):
        return False
    known = (*CONTAINERS, tuple, frozenset, bytes, complex, pathlib.PurePath, enum.Enum)
    times = (datetime.datetime, datetime.timedelta)
    return type(value) not in _NUMBERS_AND_TEXT and not isinstance(value, (*known, *times))
