"""Finds the values that the code of a callback can change, and how to replace them.

These are the attributes of a callback, of its class, and of the script's own objects that it refers
to, the variables that its functions enclose, and globals that they may change.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import datetime
import dis
import enum
import functools
import inspect
import json
import pathlib
import site
import sys
import sysconfig
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_distplug.backend.tensorflow.runtime import keras_callbacks, models
from keras_distplug.python_state import object_states

Path = tuple[str, ...]

_MOST_OBJECTS = 20_000
_MOST_BEHIND = 2_000  # objects that one of the script's leads to, which may be its samples
_INSTALLED = tuple(
    {
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        *(site.getusersitepackages(), *site.getsitepackages()),
    }
)
_LIBRARIES = frozenset({"keras", "keras_distplug"})
_OF_EVERY_CALLBACK = frozenset(vars(keras.callbacks.Callback()))
_OF_EVERY_PART = frozenset({"built", "name", "trainable", "dtype_policy"})
_NUMBERS_AND_TEXT = frozenset({bool, int, float, str, type(None)})
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
CONTAINERS = (list, dict, set, collections.deque, np.ndarray)
_NO_STATE = (types.ModuleType, types.BuiltinFunctionType, np.ufunc)


@dataclass(frozen=True)
class Attribute:
    """Sets an attribute, or takes it away.

    Args:
        owner: What has it.
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
        """Whether its class has one of that name, which is read when it is taken away."""
        return hasattr(type(self.owner), self.name)

    def delete(self) -> None:
        delattr(self.owner, self.name)


@dataclass(frozen=True)
class Owners:
    """Objects and containers on the way to values.

    Args:
        setters: By path, what sets an attribute or entry.
        objects: By `id`, the path of an object, and it.
    """

    setters: dict[Path, Callable[[str, Any], None]] = field(default_factory=dict)
    objects: dict[int, tuple[Path, Any]] = field(default_factory=dict)

    def at(self, path: Path) -> Any:
        """Returns the object with a path; None without one."""
        return next((each for there, each in self.objects.values() if there == path), None)


@dataclass(frozen=True)
class Place:
    """A value that a callback can reach.

    Args:
        path: The way to it, the same in another process.
        value: The value.
        put: Replaces it.
        is_global: Whether a global variable leads to it.
        same_as: The path of the object that it is, of one that has a path already.
    """

    path: Path
    value: Any
    put: Callable[[Any], None]
    is_global: bool
    same_as: Path | None = None

    @property
    def title(self) -> str:
        """The way to it as the script has it: `meter.total`."""
        return title_of(self.path)


def title_of(path: Path) -> str:
    """As `Place.title`."""
    return ".".join(part for part in path if not part.startswith("<"))


def places_of(
    callback: keras.callbacks.Callback, closed: Sequence[Any], owners: Owners, at_start: Owners
) -> list[Place]:
    """Returns the values that `callback` can reach.

    Args:
        callback: The callback. Attributes that Keras' own classes set are skipped.
        closed: Objects that are not looked into.
        owners: Gets what leads to them.
        at_start: What led to them when training started; objects keep the path of then.
    """
    walk = _Walk(closed, owners, at_start)
    return [*walk.through(callback), *walk.postponed()]


def places_behind(roots: Mapping[str, Any], owners: Owners) -> list[Place]:
    """Returns the values that objects and functions of the script can reach, as for a callback.

    Args:
        roots: The objects and functions, by the first part of their paths.
        owners: As for `places_of`.
    """
    walk = _Walk([], owners, Owners(), most_objects=_MOST_BEHIND)
    found = [place for name, root in roots.items() for place in walk.from_root((name,), root)]
    return [*found, *walk.postponed()]


def places_set_on(
    model: keras.Model,
    callbacks: Sequence[keras.callbacks.Callback],
    owners: Owners,
    at_start: Owners,
    *,
    by_itself: bool,
) -> list[Place]:
    """Returns the attributes of a model, its layers, metrics, loss and optimizer that code of the
    script sets: the callbacks' or their own. Variables are skipped.

    Args:
        model: The model. Attributes that Keras sets itself are skipped.
        callbacks: The callbacks.
        owners: As for `places_of`.
        at_start: As for `places_of`.
        by_itself: Whether to include what their own code sets.
    """
    by_callbacks = _attributes_set_in(callbacks)
    parts: dict[Path, Any] = {(): model, ("loss",): model.loss, ("optimizer",): model.optimizer}
    for place, layer in models.layers_by_place(model).items():
        parts["layers", place] = layer
    for number, metric in enumerate(models.metrics_of(model)):
        parts["metrics", str(number)] = metric
    walk = _Walk([*parts.values(), *callbacks], owners, at_start)
    found = []
    for path, owner in parts.items():
        if isinstance(owner, _FUNCTIONS) and by_itself:
            found += walk.from_function(path, owner)
        if not isinstance(owner, keras.Layer | keras.Metric | keras.Loss | keras.Optimizer):
            continue
        owners.setters[path] = functools.partial(setattr, owner)
        of_keras = _set_by(tuple(filter(_is_of_library, type(owner).__mro__)))
        names = by_callbacks - (of_keras if owner is model else _OF_EVERY_PART)
        if by_itself and is_of_script(type(owner)):
            names |= _attributes_set_in([owner]) - of_keras
            found += walk.from_classes(path, type(owner))
        for name, value in _attributes(owner) if names else ():
            if name in names and not _has_variables(value):
                found += walk.from_value((*path, name), value, Attribute(owner, name))
    return [*found, *walk.postponed()]


def _has_variables(value: Any) -> bool:
    """Whether a value is, or directly holds, variables."""
    entries = value.values() if isinstance(value, dict) else value
    return variables_of(value) is not None or any(
        isinstance(each, keras.Variable | tf.Variable)
        for each in (value, *(entries if isinstance(value, dict | list | tuple) else ()))
    )


def _attributes_set_in(owners: Iterable[Any]) -> set[str]:
    """Names of attributes that functions of the script in some objects may set."""
    names: set[str] = set()
    for function in (each for owner in owners for each in functions_of(owner)):
        names |= stored(function.__code__)
        if "setattr" in function.__code__.co_names:
            names.update(each for each in function.__code__.co_consts if isinstance(each, str))
    return names


def is_of_script(kind: type) -> bool:
    """Returns whether a class belongs to the script, and not to an installed package."""
    if kind.__module__ == "__main__":
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return _is_file_of_script(file) and not _is_of_library(kind)


def attribute_names(owner: Any) -> list[str]:
    """Returns the names of what is in an object and its slots."""
    return [name for name, _ in _attributes(owner)]


def variables_of(value: Any) -> list[Any] | None:
    """Returns the variables of an object of Keras or TensorFlow; None for other objects."""
    if isinstance(value, keras.random.SeedGenerator | tf.random.Generator):
        return [value.state]
    kinds = (keras.Layer, keras.metrics.Metric, keras.optimizers.Optimizer, tf.Module)
    if isinstance(value, kinds) and not isinstance(value, tf.Variable):
        optimizer = getattr(value, "optimizer", None) if isinstance(value, keras.Model) else None
        return [*value.variables, *(optimizer.variables if optimizer is not None else ())]
    return None


class _Walk:
    def __init__(
        self,
        closed: Sequence[Any],
        owners: Owners,
        at_start: Owners,
        most_objects: int = _MOST_OBJECTS,
    ) -> None:
        self._most_objects = most_objects
        self._seen: dict[int, Any] = {id(each): each for each in closed}  # kept, so ids stay
        self._callbacks = [each for each in closed if isinstance(each, keras.callbacks.Callback)]
        self._owners = owners
        self._at_start = at_start
        self._postponed: list[Place] = []  # objects with a path of their own, if that leads there

    def through(self, callback: keras.callbacks.Callback) -> Iterator[Place]:
        self._seen[id(callback)] = callback
        own = _attributes_set_in([callback])
        others = _attributes_set_in(each for each in self._callbacks if each is not callback)
        others -= set(keras_callbacks.attributes_of(callback))  # these are saved anyway
        hidden = _set_by_library(type(callback)) - ((own | others) - _OF_EVERY_CALLBACK)
        yield from self._object(callback, (), hidden)

    def from_value(self, path: Path, value: Any, put: Callable[[Any], None]) -> list[Place]:
        return self._value(path, value, put)

    def postponed(self) -> list[Place]:
        """What is in objects that were met away from their path of the start."""
        found = []
        postponed, self._postponed = self._postponed, []
        for each in postponed:
            if id(each.value) in self._owners.objects:
                path, _ = self._owners.objects[id(each.value)]
                found.append(dataclasses.replace(each, same_as=path))
            elif self._is_new(each.value):
                found += self._object(each.value, each.path, frozenset(), is_global=each.is_global)
        return [*found, *(self.postponed() if self._postponed else ())]

    def from_root(self, path: Path, root: Any) -> list[Place]:
        if not self._is_new(root):
            return []
        if isinstance(root, _FUNCTIONS):
            return list(self._function(root, path))
        return list(self._object(root, path, frozenset()))

    def from_function(self, path: Path, function: Any) -> list[Place]:
        return list(self._function(function, path))

    def from_classes(self, path: Path, kind: type) -> list[Place]:
        """What functions of the script in a class and its bases refer to."""
        return [
            place
            for each in filter(is_of_script, kind.__mro__)
            for place in self._class(each, (*path, f"<class {each.__name__}>"))
        ]

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen or len(self._seen) > self._most_objects:
            return False
        self._seen[id(value)] = value
        return True

    def _value(
        self,
        path: Path,
        value: Any,
        put: Callable[[Any], None],
        *,
        is_hidden: bool = False,
        is_global: bool = False,
    ) -> list[Place]:
        """As `_look_into`; nothing for an object that raises errors when it is looked at."""
        found: list[Place] = []
        with contextlib.suppress(Exception):
            for place in self._look_into(path, value, put, is_hidden, is_global):
                found.append(place)
        return found

    def _look_into(
        self,
        path: Path,
        value: Any,
        put: Callable[[Any], None],
        is_hidden: bool,
        is_global: bool,
    ) -> Iterator[Place]:
        """What is in a value that leads to others; the value itself, unless it `is_hidden`."""
        if isinstance(value, type):
            if is_of_script(value):
                yield from self._class(value, (*path, f"<class {value.__name__}>"))
            return
        if isinstance(value, _NO_STATE):
            return
        if isinstance(value, _FUNCTIONS):
            if self._is_new(value):
                yield from self._function(value, path)
        elif isinstance(value, keras.callbacks.Callback):
            if self._is_new(value):
                lasting = frozenset(keras_callbacks.attributes_of(value))
                yield from self._object(value, path, _set_by_library(type(value)) - lasting)
        elif _is_object(value):
            known, _ = self._at_start.objects.get(id(value), (path, None))
            if id(value) in self._owners.objects or known != path:
                self._postponed.append(Place(path, value, put, is_global))
            elif self._is_new(value):
                yield from self._object(value, path, frozenset(), is_global=is_global)
        elif _has_objects(value):
            if self._is_new(value):
                yield from self._entries(value, path, is_global=is_global)
        elif not is_hidden:
            yield Place(path, value, put, is_global)

    def _object(
        self, owner: Any, path: Path, hidden: frozenset[str], *, is_global: bool = False
    ) -> Iterator[Place]:
        def put(name: str, value: Any) -> None:
            object.__setattr__(owner, name, value)

        self._owners.setters[path] = put
        self._owners.objects[id(owner)] = (path, owner)
        for name, value in _attributes(owner):
            if not name.startswith("__"):
                put_one = Attribute(owner, name, object.__setattr__)
                yield from self._value(
                    (*path, name), value, put_one, is_hidden=name in hidden, is_global=is_global
                )
        for kind in type(owner).__mro__:
            if is_of_script(kind) or (kind is type(owner) and not _is_of_library(kind)):
                yield from self._class(kind, (*path, f"<class {kind.__name__}>"))

    def _class(self, kind: type, path: Path) -> Iterator[Place]:
        if not self._is_new(kind):
            return
        self._owners.setters[path] = functools.partial(setattr, kind)
        for name, value in list(vars(kind).items()):
            value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            value = value.fget if isinstance(value, property) else value
            is_special = name.startswith("__") and not isinstance(value, types.FunctionType)
            if not is_special and not isinstance(value, types.MemberDescriptorType):
                put = functools.partial(setattr, kind, name)
                yield from self._value((*path, name), value, put)

    def _entries(self, value: Any, path: Path, *, is_global: bool) -> Iterator[Place]:
        keys: Any = list(value) if isinstance(value, dict) else range(len(value))
        self._owners.setters[path] = lambda name, each: _set_entry(value, json.loads(name), each)
        for key in keys:
            if type(key) in (str, int):
                put = functools.partial(_set_entry, value, key)
                entry = (*path, json.dumps(key))
                yield from self._value(entry, value[key], put, is_global=is_global)

    def _function(self, value: Any, path: Path) -> Iterator[Place]:
        if isinstance(value, types.MethodType):
            for name, part in (("<self>", value.__self__), ("<function>", value.__func__)):
                yield from self._value((*path, name), part, _refuse)
        elif isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            for name, part in zip(("<func>", "<args>", "<keywords>"), parts, strict=True):
                yield from self._value((*path, name), part, _refuse)
        elif _is_of_script(value):
            yield from self._enclosed(value, path)
            defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            for number, each in enumerate(defaults):
                if isinstance(each, list | dict | set) or _leads_on(each):
                    yield from self._value((*path, "<defaults>", str(number)), each, _refuse)
            for name, each in vars(value).items():
                put = functools.partial(setattr, value, name)
                yield from self._value((*path, name), each, put)
            yield from self._globals(value, path)

    def _enclosed(self, function: types.FunctionType, path: Path) -> Iterator[Place]:
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                if self._is_new(cell):
                    put = functools.partial(setattr, cell, "cell_contents")
                    yield from self._value((*path, "<closure>", name), cell.cell_contents, put)

    def _globals(self, function: types.FunctionType, path: Path) -> Iterator[Place]:
        named = function.__globals__
        assigned = stored(function.__code__, "STORE_GLOBAL")
        for name in dict.fromkeys(_names(function.__code__)):
            value = named.get(name)
            entry = (*path, "<global>", name)
            if isinstance(value, type):
                if is_of_script(value):
                    yield from self._class(value, (*entry, f"<class {name}>"))
            elif isinstance(value, types.ModuleType):
                yield from self._module(value, entry, function)
            elif name in assigned or isinstance(value, CONTAINERS) or _leads_on(value):
                put = functools.partial(named.__setitem__, name)
                yield from self._value(entry, value, put, is_global=True)

    def _module(
        self, module: types.ModuleType, path: Path, function: types.FunctionType
    ) -> Iterator[Place]:
        """What a function mentions of a module of the script."""
        if not _is_file_of_script(getattr(module, "__file__", None)):
            return
        for name in dict.fromkeys(_names(function.__code__)):
            if name in vars(module):
                put = functools.partial(setattr, module, name)
                yield from self._value((*path, name), vars(module)[name], put, is_global=True)


def _attributes(owner: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    with contextlib.suppress(AttributeError):
        found += dict(object.__getattribute__(owner, "__dict__")).items()
    for kind in type(owner).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # an empty slot
                    found.append((name, member.__get__(owner)))
    return found


def functions_of(owner: Any) -> Iterator[types.FunctionType]:
    """Returns functions of the script among the methods and attributes of an object."""
    kinds = [kind for kind in type(owner).__mro__ if not _is_of_library(kind)]
    members = [member for kind in kinds for member in vars(kind).values()]
    for member in [*members, *(value for _, value in _attributes(owner))]:
        member = member.func if type(member) is functools.partial else member
        if type(member) is types.FunctionType:
            member = inspect.unwrap(member)
        if type(member) is types.FunctionType and _is_of_script(member):
            yield member


def _set_entry(owner: Any, key: Any, value: Any) -> None:
    owner[key] = value


def _refuse(value: Any) -> None:
    raise LookupError("it cannot be replaced")


def _set_by_library(kind: type) -> frozenset[str]:
    """Names of the attributes that Keras' callbacks, or ours, set on their instances."""
    return _set_by(tuple(filter(_is_of_library, kind.__mro__)))


@functools.cache
def _set_by(kinds: tuple[Hashable, ...]) -> frozenset[str]:
    return _OF_EVERY_CALLBACK.union(
        name
        for each in kinds
        for function in vars(each).values()
        if isinstance(function, types.FunctionType)
        for name in stored(inspect.unwrap(function).__code__)
    )


def _is_file_of_script(file: str | None) -> bool:
    return file is not None and not file.startswith((*_INSTALLED, "<frozen"))


def _is_of_library(kind: type) -> bool:
    return kind is object or kind.__module__.split(".")[0] in _LIBRARIES


def _is_of_script(function: types.FunctionType) -> bool:
    return _is_file_of_script(function.__code__.co_filename)


def _is_object(value: Any) -> bool:
    """Returns whether a value is an object with attributes of the script's."""
    kind = type(value)
    if kind in (types.SimpleNamespace, argparse.Namespace):
        return True
    no_object = (BaseException, enum.Enum, tuple, list, dict, set, np.ndarray, keras.Variable)
    return is_of_script(kind) and not isinstance(value, no_object) and variables_of(value) is None


def _leads_on(value: Any) -> bool:
    """Returns whether a value may hold state though it is no number, text or array."""
    is_function = isinstance(value, types.FunctionType | functools.partial)
    return (
        is_function
        or isinstance(value, keras.callbacks.Callback | keras.Variable | tf.Variable)
        or object_states.is_generator(value)
        or _is_object(value)
        or variables_of(value) is not None
    )


def _has_objects(value: Any, depth: int = 4) -> bool:
    """Returns whether entries of a container lead on."""
    is_container = isinstance(value, dict | list | tuple | collections.deque)
    if not is_container or len(value) > _MOST_OBJECTS or not depth:
        return False
    entries = list(value.values()) if isinstance(value, dict) else list(value)
    if set(map(type, entries)) <= _NUMBERS_AND_TEXT:
        return False
    return any(_is_looked_into(each) or _has_objects(each, depth - 1) for each in entries)


def _is_looked_into(value: Any) -> bool:
    """Returns whether an entry keeps its container from being saved as a whole."""
    if isinstance(value, keras.Variable | tf.Variable | tf.Tensor | np.ndarray | np.generic):
        return False
    known = (*CONTAINERS, tuple, frozenset, bytes, complex, pathlib.PurePath, enum.Enum)
    times = (datetime.datetime, datetime.timedelta)
    return type(value) not in _NUMBERS_AND_TEXT and not isinstance(value, (*known, *times))


def _names(code: types.CodeType) -> Iterator[str]:
    """Names that a function, or one within it, mentions."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names(each)


@functools.lru_cache(4096)  # by content, at every save
def stored(code: types.CodeType, operation: str = "STORE_ATTR") -> frozenset[str]:
    """Returns names of attributes, or of globals, that a function, or one within it, assigns."""
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    own: set[str] = set()
    if dis.opmap[operation] in code.co_code[::2]:  # most functions assign none
        own = {each.argval for each in dis.get_instructions(code) if each.opname == operation}
    return frozenset(own).union(*(stored(each, operation) for each in inner))
