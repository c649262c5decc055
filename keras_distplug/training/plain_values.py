"""Python values as JSON and arrays, and back, with their types."""

from __future__ import annotations

import base64
import collections
import datetime
import enum
import math
import pathlib
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_ARRAY, _FLOAT, _SCALAR, _COMPLEX = "__array__", "__float__", "__scalar__", "__complex__"
_TENSOR, _VARIABLE, _NUMBERS = "__tensor__", "__variable__", "__numbers__"
_TUPLE, _SET, _FROZEN, _DEQUE, _PAIRS = (
    *("__tuple__", "__set__", "__frozenset__", "__deque__", "__pairs__"),
)
_KERAS_VARIABLE, _ENUM = "__keras_variable__", "__enum__"
_BYTES, _PATH, _TIME, _DURATION = "__bytes__", "__path__", "__datetime__", "__timedelta__"
_KINDS = {
    "Counter": collections.Counter,
    "OrderedDict": collections.OrderedDict,
    "defaultdict": collections.defaultdict,
}
_LONG = 64  # numbers of a list that JSON holds one by one
_PLAIN = frozenset({bool, int, str, type(None)})


class UnsavableError(TypeError):
    """A value that neither JSON nor arrays can hold.

    Args:
        path: Where it is in the value that was encoded: `best/0`.
        value: The value.
    """

    def __init__(self, path: str, value: Any) -> None:
        super().__init__(f"{path}: {value!r:.200}")
        self.path = path
        self.value = value


class Encoder:
    """Encodes values.

    Args:
        arrays: Where their arrays go, by key.
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
            value: Numbers, text, bytes, arrays, tensors, variables, paths, times, `None`, and
                lists, tuples, sets, deques and dicts of these.
            key: Of its first array; those within it get longer ones.
            path: For errors.

        Raises:
            UnsavableError: If it holds anything else.
        """
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, enum.Enum):
            return {_ENUM: value.name}
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
        if type(value) is list:
            return self._numbers(value, key) or self._entries(value, key, path)
        if type(value) is collections.deque:
            return {_DEQUE: [value.maxlen, self._entries(list(value), key, path)]}
        if type(value) in (set, frozenset):
            # In an order that is the same in another process.
            entries = sorted(value, key=lambda each: (type(each).__name__, repr(each)))
            tag = _SET if type(value) is set else _FROZEN
            return {tag: self._entries(entries, key, path)}
        if isinstance(value, tuple):  # named ones, too
            return {_TUPLE: self._entries(list(value), key, path)}
        raise UnsavableError(path, value)

    def _entries(self, values: list[Any], key: str, path: str) -> list[Any]:
        return [
            self.encode(each, f"{key}/{number}", f"{path}/{number}")
            for number, each in enumerate(values)
        ]

    def _numbers(self, values: list[Any], key: str) -> Any:
        """A long list of numbers as an array."""
        kinds = set(map(type, values)) if len(values) > _LONG else set()
        if kinds == {float}:
            self._arrays[key] = np.array(values, "float64")
        elif kinds == {int} and min(values) >= -(2**63) and max(values) < 2**63:
            self._arrays[key] = np.array(values, "int64")
        else:
            return None
        return {_NUMBERS: key}

    def _mapping(self, value: dict[Any, Any], key: str, path: str) -> Any:
        kind = next((name for name, each in _KINDS.items() if type(value) is each), None)
        if type(value) is not dict and kind is None:
            raise UnsavableError(path, value)
        if kind is None and all(type(k) is str and not k.startswith("__") for k in value):
            return {k: self.encode(each, f"{key}/{k}", f"{path}/{k}") for k, each in value.items()}
        pairs = [
            [self.encode(k, f"{key}/{n}/key", path), self.encode(v, f"{key}/{n}", f"{path}/{k}")]
            for n, (k, v) in enumerate(value.items())
        ]
        return {_PAIRS: [kind, pairs]}

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
        except Exception:  # noqa: BLE001 (a tensor of a graph, a variable that is gone)
            raise UnsavableError(path, value) from None
        if array.dtype.kind in "OSUMm":
            raise UnsavableError(path, value)
        self._arrays[key] = array
        return {tag: key}


@dataclass(frozen=True)
class _Member:
    """Of an `Enum` that is known where its value goes."""

    name: str


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
    """Returns the value that `Encoder.encode` was given. A variable becomes a new one."""
    if isinstance(value, list):
        return [decode(each, arrays) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        [(tag, content)] = value.items()
        if tag in _DECODERS:
            return _DECODERS[tag](content, arrays)
    return {name: decode(each, arrays) for name, each in value.items()}


def _pairs(content: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    kind, pairs = content
    made = {decode(k, arrays): decode(v, arrays) for k, v in pairs}
    if kind == "defaultdict":
        return collections.defaultdict(None, made)
    return _KINDS[kind](made) if kind else made


_DECODERS: dict[str, Callable[[Any, Mapping[str, np.ndarray]], Any]] = {
    _ARRAY: lambda key, arrays: arrays[key],
    _NUMBERS: lambda key, arrays: arrays[key].tolist(),
    _TENSOR: lambda key, arrays: tf.constant(arrays[key]),
    _VARIABLE: lambda key, arrays: tf.Variable(arrays[key]),
    _KERAS_VARIABLE: lambda key, arrays: keras.Variable(arrays[key], dtype=arrays[key].dtype.name),
    _ENUM: lambda name, arrays: _Member(name),
    _FLOAT: lambda text, arrays: float(text),
    _SCALAR: lambda of, arrays: np.dtype(of[0]).type(
        float(of[1]) if isinstance(of[1], str) else of[1]
    ),
    _COMPLEX: lambda parts, arrays: complex(*map(float, parts)),
    _TUPLE: lambda entries, arrays: tuple(decode(entries, arrays)),
    _SET: lambda entries, arrays: set(decode(entries, arrays)),
    _FROZEN: lambda entries, arrays: frozenset(decode(entries, arrays)),
    _DEQUE: lambda of, arrays: collections.deque(decode(of[1], arrays), of[0]),
    _PAIRS: _pairs,
    _BYTES: lambda text, arrays: base64.b64decode(text),
    _PATH: lambda text, arrays: pathlib.Path(text),
    _TIME: lambda text, arrays: datetime.datetime.fromisoformat(text),
    _DURATION: lambda parts, arrays: datetime.timedelta(*parts),
}


def put(there: Any, value: Any) -> Any:
    """Makes `there` equal to `value`, in place if it can be changed, and returns it; otherwise
    returns what should take its place."""
    if isinstance(value, _Member):
        return type(there)[value.name] if isinstance(there, enum.Enum) else None
    if isinstance(value, keras.Variable | tf.Variable):
        if isinstance(there, keras.Variable | tf.Variable) and there.shape == value.shape:
            there.assign(value)
            return there
    elif isinstance(there, list) and isinstance(value, list):
        there[:] = [
            put(there[number], each) if number < len(there) else each
            for number, each in enumerate(value)
        ]
        return there
    elif isinstance(there, np.ndarray) and isinstance(value, np.ndarray):
        alike = (there.shape, there.dtype) == (value.shape, value.dtype)
        if alike and there.flags.writeable:
            there[...] = value
            return there
    elif isinstance(there, dict) and isinstance(value, dict):
        made = {k: put(there[k], each) if k in there else each for k, each in value.items()}
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
    elif isinstance(there, tuple) and isinstance(value, tuple) and hasattr(there, "_make"):
        return there._make(value) if len(there) == len(value) else value
    return value
