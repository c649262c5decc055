"""Converts Python values to JSON and arrays, and back, with their types."""

from __future__ import annotations

import base64
import collections
import datetime
import enum
import math
import pathlib
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_ARRAY, _FLOAT, _SCALAR, _COMPLEX = "__array__", "__float__", "__scalar__", "__complex__"
_TENSOR, _VARIABLE, _KERAS_VARIABLE = "__tensor__", "__variable__", "__keras_variable__"
_NUMBERS, _SCALARS, _TUPLE, _NAMED = "__numbers__", "__scalars__", "__tuple__", "__namedtuple__"
_SET, _FROZEN, _DEQUE, _PAIRS = "__set__", "__frozenset__", "__deque__", "__pairs__"
_BYTES, _PATH, _TIME, _DURATION = "__bytes__", "__path__", "__datetime__", "__timedelta__"
_ENUM = "__enum__"
_PLAIN = frozenset({bool, int, str, type(None)})
_FACTORIES = {each.__name__: each for each in (bool, dict, float, int, list, set, str, tuple)}
_OF_THERE = "?"  # a dict whose type is known only from the object in its place
_LONG = 64  # longest list of numbers that is stored as JSON numbers
_TRIES = 5  # attempts to copy a value that another thread changes


class UnsavableError(TypeError):
    """A value that neither JSON nor arrays can hold.

    Args:
        path: Its position in the value that was encoded, such as `best/0`.
        value: The value.
    """

    def __init__(self, path: str, value: Any) -> None:
        super().__init__(f"{path}: a {type(value).__name__}")
        self.path = path
        self.value = value


class Encoder:
    """Encodes values.

    Args:
        arrays: Receives their arrays by key.
        take: Returns an array to keep: a copy if the original may change before it is written.
    """

    def __init__(
        self,
        arrays: MutableMapping[str, np.ndarray],
        take: Callable[[Any], np.ndarray] = np.array,
    ) -> None:
        self._arrays = arrays
        self._take = take

    def encode(self, value: Any, key: str, path: str = "") -> Any:
        """Returns `value` as JSON.

        Args:
            value: Numbers, text, bytes, arrays, tensors, variables, paths, times, members of
                enumerations, `None`, and lists, tuples, sets, deques and dicts of these.
            key: Key of its first array; arrays within it get longer keys.
            path: The value's path, for errors.

        Raises:
            UnsavableError: If it holds anything else.
        """
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, enum.Enum):
            return {_ENUM: [_get_name(kind, value, path), value.name]}
        if kind is float:
            return value if math.isfinite(value) else {_FLOAT: str(value)}
        if isinstance(value, np.generic):
            return self._scalar(value, path)
        if isinstance(value, list | tuple | set | frozenset | collections.deque):
            return self._sequence(value, key, path)
        if isinstance(value, dict):
            return self._mapping(value, key, path)
        if (single := _single(value)) is not None:
            return single
        return self._array(value, key, path)

    def _scalar(self, value: np.generic, path: str) -> Any:
        if value.dtype.kind in "biu":
            return {_SCALAR: [value.dtype.name, value.item()]}
        if value.dtype.kind == "f" or value.dtype.name == "bfloat16":
            return {_SCALAR: [value.dtype.name, str(float(value))]}
        raise UnsavableError(path, value)

    def _sequence(self, value: Any, key: str, path: str) -> Any:
        kind, entries = type(value), _copied(list, value, path)
        if isinstance(value, list) and (kind is list or _is_of_keras(kind)):
            return self._entries(entries, key, path)
        if kind is collections.deque:
            return {_DEQUE: [value.maxlen, self._entries(entries, key, path)]}
        if kind in (set, frozenset):
            # In an order that is the same in every process.
            entries.sort(key=lambda each: (type(each).__name__, repr(each)))
            tag = _SET if kind is set else _FROZEN
            return {tag: self._entries(entries, key, path)}
        if kind is tuple:
            return {_TUPLE: self._entries(entries, key, path)}
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return {_NAMED: [_get_name(kind, value, path), self._entries(entries, key, path)]}
        raise UnsavableError(path, value)

    def _entries(self, values: list[Any], key: str, path: str) -> Any:
        kinds = set(map(type, values))
        if kinds <= _PLAIN and kinds != {int}:
            return values
        if len(values) > _LONG and (packed := self._packed(values, kinds, key)) is not None:
            return packed
        return [
            self.encode(each, f"{key}/{number}", f"{path}/{number}")
            for number, each in enumerate(values)
        ]

    def _packed(self, values: list[Any], kinds: set[type], key: str) -> Any:
        """Returns a long list of numbers of one type as an array; None for other lists."""
        [kind, *others] = kinds
        if others:
            return None
        if kind is float:
            self._arrays[key] = np.array(values, "float64")
            return {_NUMBERS: key}
        if kind is int and min(values) >= -(2**63) and max(values) < 2**63:
            self._arrays[key] = np.array(values, "int64")
            return {_NUMBERS: key}
        if issubclass(kind, np.number):
            self._arrays[key] = np.array(values)
            return {_SCALARS: key}
        return None

    def _mapping(self, value: dict[Any, Any], key: str, path: str) -> Any:
        pairs = _copied(lambda given: list(given.items()), value, path)
        kind = _get_kind(value)
        names = [each for each, _ in pairs]
        if kind == "" and all(type(each) is str and not each.startswith("__") for each in names):
            if {type(each) for _, each in pairs} <= _PLAIN:
                return dict(pairs)
            return {k: self.encode(each, f"{key}/{k}", f"{path}/{k}") for k, each in pairs}
        values = [each for _, each in pairs]
        encoded = (
            self._entries(each, f"{key}/{n}", path) for n, each in enumerate((names, values))
        )
        return {_PAIRS: [kind, *encoded]}

    def _array(self, value: Any, key: str, path: str) -> Any:
        if isinstance(value, keras.Variable | tf.Variable):
            tag = _KERAS_VARIABLE if isinstance(value, keras.Variable) else _VARIABLE
        elif isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
            tag = _TENSOR
        elif isinstance(value, np.ndarray):
            tag = _ARRAY
        else:
            raise UnsavableError(path, value)
        try:
            array = self._take(value if tag == _ARRAY else value.numpy())
        except Exception:  # noqa: BLE001 (a graph tensor, a deleted variable)
            raise UnsavableError(path, value) from None
        if array.dtype.kind in "OSUMm" or array.dtype.type is np.void:
            raise UnsavableError(path, value)
        self._arrays[key] = array
        return {tag: key}


def _copied(copy: Callable[[Any], list[Any]], value: Any, path: str) -> list[Any]:
    """Returns a copy of entries that another thread may be changing."""
    for _ in range(_TRIES):
        try:
            return copy(value)
        except RuntimeError:  # changed during iteration
            continue
    raise UnsavableError(path, value)


def _get_kind(value: dict[Any, Any]) -> str:
    """Returns a name from which a dict of the same type can be created."""
    if type(value) is collections.defaultdict:
        name = getattr(value.default_factory, "__name__", "")
        return f"defaultdict {name}" if _FACTORIES.get(name) is value.default_factory else _OF_THERE
    if type(value) in (collections.Counter, collections.OrderedDict):
        return type(value).__name__
    return "" if type(value) is dict or _is_of_keras(type(value)) else _OF_THERE


def _is_of_keras(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "keras"  # models wrap their attributes in these


def _get_name(kind: type, value: Any, path: str) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    try:
        if _class(name) is kind:
            return name
    except LookupError:
        pass
    raise UnsavableError(path, value)


def _class(name: str) -> type:
    """Returns the enumeration or named tuple class with that name."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    is_one = isinstance(found, type) and (
        issubclass(found, enum.Enum) or (issubclass(found, tuple) and hasattr(found, "_fields"))
    )
    if not is_one:
        raise LookupError(name)
    return found  # type: ignore[no-any-return]


def _single(value: Any) -> Any:
    match value:
        case complex():
            return {_COMPLEX: [repr(value.real), repr(value.imag)]}
        case bytes():
            return {_BYTES: base64.b64encode(value).decode()}
        case pathlib.PurePath():
            return {_PATH: str(value)}
        case datetime.datetime():
            return {_TIME: value.isoformat()}
        case datetime.timedelta():
            return {_DURATION: [value.days, value.seconds, value.microseconds]}
    return None


def decode(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Returns the value that `Encoder.encode` was given. A variable becomes a new one.

    Raises:
        LookupError: If the class of an enumeration member or named tuple no longer exists.
    """
    if isinstance(value, list):
        return [decode(each, arrays) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        [(tag, content)] = value.items()
        if tag in _DECODERS:
            return _DECODERS[tag](content, arrays)
    return {name: decode(each, arrays) for name, each in value.items()}


class _Entries(dict[Any, Any]):
    """The entries of a dict whose type is known only from the object in its place."""


def _mapping(content: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    kind, names, values = content
    made = dict(zip(decode(names, arrays), decode(values, arrays), strict=True))
    if kind == _OF_THERE:
        return _Entries(made)
    if kind.startswith("defaultdict "):
        return collections.defaultdict(_FACTORIES[kind.partition(" ")[2]], made)
    return getattr(collections, kind)(made) if kind else made


def _named(content: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    return _class(content[0])._make(decode(content[1], arrays))  # type: ignore[attr-defined]


_DECODERS: dict[str, Callable[[Any, Mapping[str, np.ndarray]], Any]] = {
    _ARRAY: lambda key, arrays: arrays[key],
    _NUMBERS: lambda key, arrays: arrays[key].tolist(),
    _SCALARS: lambda key, arrays: list(arrays[key]),
    _TENSOR: lambda key, arrays: tf.constant(arrays[key]),
    _VARIABLE: lambda key, arrays: tf.Variable(arrays[key]),
    _KERAS_VARIABLE: lambda key, arrays: keras.Variable(arrays[key], dtype=arrays[key].dtype.name),
    _ENUM: lambda of, arrays: _class(of[0])[of[1]],  # type: ignore[index]
    _FLOAT: lambda text, arrays: float(text),
    _SCALAR: lambda of, arrays: np.dtype(of[0]).type(
        float(of[1]) if isinstance(of[1], str) else of[1]
    ),
    _COMPLEX: lambda parts, arrays: complex(*map(float, parts)),
    _TUPLE: lambda entries, arrays: tuple(decode(entries, arrays)),
    _NAMED: _named,
    _SET: lambda entries, arrays: set(decode(entries, arrays)),
    _FROZEN: lambda entries, arrays: frozenset(decode(entries, arrays)),
    _DEQUE: lambda of, arrays: collections.deque(decode(of[1], arrays), of[0]),
    _PAIRS: _mapping,
    _BYTES: lambda text, arrays: base64.b64decode(text),
    _PATH: lambda text, arrays: pathlib.Path(text),
    _TIME: lambda text, arrays: datetime.datetime.fromisoformat(text),
    _DURATION: lambda parts, arrays: datetime.timedelta(*parts),
}


def replace(there: Any, value: Any) -> Any:
    """Returns `value`; or, if only the object in its place has its type, that one made equal to it.

    Raises:
        LookupError: If no object with that type is in its place.
    """
    if isinstance(value, _Entries):
        if not isinstance(there, dict):
            raise LookupError("its type is not known")
        return put(there, value)
    return value


def put(there: Any, value: Any) -> Any:
    """Makes `there` equal to `value`, in place if it is mutable, and returns it; otherwise returns
    its replacement."""
    if isinstance(value, keras.Variable | tf.Variable):
        if isinstance(there, keras.Variable | tf.Variable) and there.shape == value.shape:
            there.assign(value)
            return there
    elif isinstance(there, list) and isinstance(value, list):
        there[:] = [
            put(there[number], each) if number < len(there) else replace(None, each)
            for number, each in enumerate(value)
        ]
        return there
    elif isinstance(there, np.ndarray) and isinstance(value, np.ndarray):
        alike = (there.shape, there.dtype) == (value.shape, value.dtype)
        if alike and there.flags.writeable:
            there[...] = value
            return there
    elif isinstance(there, dict) and isinstance(value, dict):
        make = there.default_factory if isinstance(there, collections.defaultdict) else None
        made = {
            k: put(there[k] if k in there else make and make(), each) for k, each in value.items()
        }
        there.clear()
        there.update(made)
        return there
    elif isinstance(there, set) and isinstance(value, set):
        there.clear()
        there.update(value)
        return there
    elif isinstance(there, collections.deque) and isinstance(value, collections.deque):
        there.clear()
        there.extend(value)
        return there
    return replace(there, value)
