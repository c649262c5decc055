"""Finds variables reachable from Python objects, under names that are the same in other processes.

A name is the path to a variable: `model/loss/<closure> beta` is the variable `beta` of the function
that encloses the loss.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_distplug.python_state import script_code

_MOST_OBJECTS = 200_000
_MOST_ENTRIES = 10_000  # per list or dict
_SEPARATOR = "/"
# Their functions refer to no objects of the user.
_LIBRARIES = frozenset(
    {"absl", "h5py", "keras", "keras_distplug", "numpy", "optree", "pandas", "scipy", "tensorflow"}
    | sys.stdlib_module_names
) - {"__main__"}
_CLOSED = _LIBRARIES - {"keras", "tensorflow", "functools", "collections", "types"}
_LEAVES = frozenset({str, bytes, int, float, complex, bool, type(None), np.ndarray})
# Attributes that appear while a model is trained, or lead to objects outside it.
_PASSING = frozenset(
    {"train_function", "test_function", "predict_function", "history", "_history", "_model"}
)
_OURS = ("_distplug",)


def find(
    roots: Mapping[str, Any], is_wanted: Callable[[Any], bool], most: float = math.inf
) -> dict[str, Any]:
    """Returns the variables reachable from `roots`, nearest first.

    Args:
        roots: Objects by name.
        is_wanted: Returns True for a Keras or TensorFlow variable that should be found.
        most: The largest possible number of such variables.
    """
    found: dict[str, Any] = {}
    # Every object is kept, so that its id is not reused, with its name in its owner and that id.
    seen: dict[int, tuple[Any, str, int]] = {}
    queue: collections.deque[Any] = collections.deque()

    def add(name: str, value: Any, owner: int) -> None:
        if type(value) not in _LEAVES and id(value) not in seen:
            seen[id(value)] = value, name, owner
            queue.append(value)

    def describe_path(value: Any) -> str:
        names, number = [], id(value)
        while number:
            _, name, number = seen[number]
            names.append(name)
        return _SEPARATOR.join(reversed(names))

    for name, root in roots.items():
        add(name, root, 0)
    while queue and len(seen) < _MOST_OBJECTS and len(found) < most:
        value = queue.popleft()
        if _is_variable(value):
            if is_wanted(value):
                found[describe_path(value)] = value
            if issubclass(type(value), keras.Variable):
                seen.setdefault(id(value._value), (value._value, "", id(value)))
            continue
        # An error raised by a user's object during inspection must not end training.
        with contextlib.suppress(Exception):
            for name, each in _parts(value):
                add(name, each, id(value))
    return found


def resolve(roots: Mapping[str, Any], path: str) -> Any | None:
    """Returns the variable that `find` lists under that name; None if it does not exist."""
    for name, root in roots.items():
        if path == name or path.startswith(f"{name}{_SEPARATOR}"):
            value = _follow(root, path[len(name) + 1 :])
            return value if _is_variable(value) else None
    return None


def _follow(value: Any, path: str) -> Any | None:
    while path:
        parts: list[tuple[str, Any]] = []
        with contextlib.suppress(Exception):
            parts += _parts(value)
        for step, each in parts:
            if path == step or path.startswith(f"{step}{_SEPARATOR}"):
                value, path = each, path[len(step) + 1 :]
                break
        else:
            return None
    return value


def _is_variable(value: Any) -> bool:
    return issubclass(type(value), keras.Variable | tf.Variable)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the objects that an object refers to, with names that are the same in another process.
    Avoids the user's methods and properties, which may have side effects."""
    kind = type(value)
    if kind.__module__ == "tensorflow.python.trackable.data_structures":
        # TensorFlow's wrappers of lists, tuples and dicts that are attributes of its modules.
        value = list(value) if issubclass(kind, list) else getattr(value, "__wrapped__", ())
        kind = type(value)
    if issubclass(kind, dict):
        for key, each in itertools.islice(dict.items(value), _MOST_ENTRIES):
            if _is_name(key):
                yield f"[{key!r}]", each
    elif issubclass(kind, list | tuple | collections.deque):
        owner = next(each for each in (list, tuple, collections.deque) if issubclass(kind, each))
        for number, each in enumerate(itertools.islice(owner.__iter__(value), _MOST_ENTRIES)):
            yield f"[{number}]", each
    elif issubclass(kind, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif issubclass(kind, types.MethodType):
        yield from (("<self>", value.__self__), ("<function>", value.__func__))
    elif issubclass(kind, types.FunctionType):
        yield from _function_parts(value)
    elif not issubclass(kind, types.ModuleType | type) and not _is_closed(kind):
        yield from _object_parts(value)


def _is_name(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_name, key))
    return type(key) in (str, int, bool)


def _object_parts(value: Any) -> Iterator[tuple[str, Any]]:
    yield from _attributes(script_code.attributes(value))
    if issubclass(type(value), tf.types.experimental.PolymorphicFunction):
        yield "<function>", value.python_function
    for owner in type(value).__mro__:
        if not _is_of_library(owner.__module__):
            for name, each in _attributes(vars(owner).items()):
                yield f"<class {owner.__name__}> {name}", each


def _attributes(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, each in list(named):
        if name in _PASSING or name.startswith(("__", *_OURS)):
            continue
        each = each.__func__ if isinstance(each, staticmethod | classmethod) else each
        yield name, each.fget if isinstance(each, property) else each


def _function_parts(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"<closure> {name}", cell.cell_contents
        except ValueError:  # empty cell
            continue
    yield from (("<defaults>", function.__defaults__), ("<keywords>", function.__kwdefaults__))
    if (wrapped := getattr(function, "__wrapped__", None)) is not None:
        yield "<wrapped>", wrapped
    if _is_of_library(function.__module__):
        return
    names = list(script_code.mentioned_names(function.__code__))
    for name in names:
        each = function.__globals__.get(name)
        if isinstance(each, types.ModuleType):
            yield from _module_parts(f"<global> {name}", each, names)
        elif isinstance(each, type):
            if not _is_of_library(each.__module__):
                for inner, member in _attributes(vars(each).items()):
                    yield f"<global> {name}.{inner}", member
        elif each is not None:
            yield f"<global> {name}", each


def _module_parts(
    path: str, module: types.ModuleType, names: Sequence[str], depth: int = 4
) -> Iterator[tuple[str, Any]]:
    """Yields the objects of a module, and of modules within it, that a function may mention."""
    if _is_of_library(module.__name__):
        return
    for name in names:
        each = vars(module).get(name)
        if isinstance(each, types.ModuleType):
            if depth:
                yield from _module_parts(f"{path}.{name}", each, names, depth - 1)
        elif each is not None:
            yield f"{path}.{name}", each


def _is_closed(kind: type) -> bool:
    """Returns True if no object referred to by instances of `kind` can belong to a step."""
    module = str(kind.__module__)
    if module == "argparse":
        return False  # often used for settings
    return (
        module.split(".")[0] in _CLOSED
        or ".data.ops." in module
        or issubclass(kind, tf.data.Dataset | tf.Graph | tf.Operation | tf.Tensor | tf.DType)
        or issubclass(kind, keras.KerasTensor)
    )


def _is_of_library(module: str | None) -> bool:
    return (module or "").split(".")[0] in _LIBRARIES
