"""Finds the variables that Python objects lead to, under names that another process finds them by.

A name is the way to a variable: `model/loss/<closure> beta` is the variable `beta` of the function
that encloses the loss.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

_MOST_OBJECTS = 200_000
_MOST_ENTRIES = 10_000  # of a list or dict
_SEPARATOR = "/"
# Nothing that their functions refer to is a user's.
_LIBRARIES = frozenset(
    {"absl", "h5py", "keras", "keras_distplug", "numpy", "optree", "pandas", "scipy", "tensorflow"}
    | sys.stdlib_module_names
) - {"__main__"}
_CLOSED = _LIBRARIES - {"keras", "tensorflow", "functools", "collections", "types"}
_LEAVES = (str, bytes, int, float, complex, type(None), tf.Tensor, tf.DType, tf.TensorShape)
# What appears while a model is trained, or leads from it to what is not its own.
_PASSING = frozenset(
    {"train_function", "test_function", "predict_function", "history", "_history", "_model"}
)
_OURS = ("_distplug",)


def find(roots: Mapping[str, Any]) -> dict[str, Any]:
    """The variables, of Keras or TensorFlow, that `roots` lead to, each once, nearest first."""
    found: dict[str, Any] = {}
    seen: dict[int, Any] = {}  # objects, which stay alive so that no other one gets the number
    queue = collections.deque((name, root) for name, root in roots.items())
    while queue and len(seen) < _MOST_OBJECTS:
        path, value = queue.popleft()
        if id(value) in seen or isinstance(value, _LEAVES):
            continue
        seen[id(value)] = value
        if _is_variable(value):
            found[path] = value
            if isinstance(value, keras.Variable):
                seen[id(value._value)] = value._value
            continue
        queue.extend((f"{path}{_SEPARATOR}{step}", each) for step, each in _parts(value))
    return found


def resolve(roots: Mapping[str, Any], path: str) -> Any | None:
    """The variable that `find` gave that name; None if there is none."""
    for name, root in roots.items():
        if path == name or path.startswith(f"{name}{_SEPARATOR}"):
            value = _follow(root, path[len(name) + 1 :])
            return value if _is_variable(value) else None
    return None


def _follow(value: Any, path: str) -> Any | None:
    while path:
        for step, each in _parts(value):
            if path == step or path.startswith(f"{step}{_SEPARATOR}"):
                value, path = each, path[len(step) + 1 :]
                break
        else:
            return None
    return value


def _is_variable(value: Any) -> bool:
    return isinstance(value, keras.Variable | tf.Variable)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object refers to, each under a name that is the same in another process."""
    if isinstance(value, dict):
        for key, each in list(value.items())[:_MOST_ENTRIES]:
            if isinstance(key, str | int):
                yield f"[{key!r}]", each
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value[:_MOST_ENTRIES]):
            yield f"[{number}]", each
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield from (("<self>", value.__self__), ("<function>", value.__func__))
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, types.ModuleType | type) or _is_closed(type(value)):
        return
    else:
        yield from _of_object(value)


def _of_object(value: Any) -> Iterator[tuple[str, Any]]:
    # Past `__getattr__`, `__getattribute__` and properties of the user's, which may do anything.
    with contextlib.suppress(AttributeError):
        yield from _attributes(object.__getattribute__(value, "__dict__"))
    if isinstance(value, tf.types.experimental.PolymorphicFunction):
        yield "<function>", value.python_function
    for owner in type(value).__mro__:
        for name, member in vars(owner).items():
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield name, member.__get__(value)
                except AttributeError:  # nothing is there
                    continue
        if not _is_of_library(owner.__module__):
            for name, each in _attributes(vars(owner)):
                yield f"<class {owner.__name__}> {name}", each


def _attributes(named: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, each in list(named.items()):
        if name in _PASSING or name.startswith(("__", *_OURS)):
            continue
        each = each.__func__ if isinstance(each, staticmethod | classmethod) else each
        yield name, each.fget if isinstance(each, property) else each


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"<closure> {name}", cell.cell_contents
        except ValueError:  # it is empty
            continue
    yield from (("<defaults>", function.__defaults__), ("<keywords>", function.__kwdefaults__))
    if (wrapped := getattr(function, "__wrapped__", None)) is not None:
        yield "<wrapped>", wrapped
    if _is_of_library(function.__module__):
        return
    names = list(_names(function.__code__))
    for name in names:
        each = function.__globals__.get(name)
        if isinstance(each, types.ModuleType):
            if not _is_of_library(each.__name__):
                for inner in names:
                    yield f"<global> {name}.{inner}", vars(each).get(inner)
        elif isinstance(each, type):
            if not _is_of_library(each.__module__):
                for inner, member in _attributes(vars(each)):
                    yield f"<global> {name}.{inner}", member
        elif each is not None:
            yield f"<global> {name}", each


def _names(code: types.CodeType) -> Iterator[str]:
    """Global names, and names of attributes, that a function mentions, and those within it."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names(each)


def _is_closed(kind: type) -> bool:
    """Does nothing that such objects refer to belong to a step?"""
    module = kind.__module__ or ""
    return (
        module.split(".")[0] in _CLOSED
        or ".data.ops." in module
        or issubclass(kind, tf.data.Dataset | tf.Graph | tf.Operation)
    )


def _is_of_library(module: str | None) -> bool:
    return (module or "").split(".")[0] in _LIBRARIES
