"""Checks values read from a file against the type hints of their dataclass."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], bool]
_LARGEST_FLOAT = int(sys.float_info.max)


def require_types(instance: Any) -> None:
    """Checks that the fields of a dataclass match their type hints.

    Supports `Any`, classes, unions, `Mapping[str, T]`, `list[T]` and `tuple[T, ...]`. As in JSON,
    an `int` is a valid `float` if it is in a float's range. A `bool` is neither.

    Raises:
        TypeError: If a field does not match. The message names the field.
    """
    for name, hint, plain, check in _checks(instance.__class__):
        value = getattr(instance, name)
        # A fast path: a log has a million values, and most of them are of plain types.
        if value.__class__ not in plain and not check(value):
            shown = repr(value)
            shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
            raise TypeError(f"Expected `{name}` to be {hint}. Received: {shown}")


@functools.cache
def _checks(kind: type) -> tuple[tuple[str, str, frozenset[type], Check], ...]:
    hints = typing.get_type_hints(kind)
    return tuple(
        (name, _describe(hints[name]), _plain(hints[name]), _check(hints[name]))
        for name in (field.name for field in dataclasses.fields(kind))
    )


def _describe(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def _plain(hint: Any) -> frozenset[type]:
    """Returns the types of which all values match `hint`."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return frozenset[type]().union(*map(_plain, typing.get_args(hint)))
    return frozenset({hint} if hint in (int, str, bool, float, types.NoneType) else ())


def _check(hint: Any) -> Check:
    if hint is Any:
        return lambda value: True
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        checks = [_check(each) for each in arguments]
        return lambda value: any(check(value) for check in checks)
    if origin in (list, tuple):
        inner = _check(arguments[0])
        return lambda value: isinstance(value, origin) and all(map(inner, value))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        inner = _check(arguments[1])
        return lambda value: (
            isinstance(value, dict)
            and all(type(key) is str for key in value)
            and all(map(inner, value.values()))
        )
    if hint is float:
        return lambda value: (
            type(value) is float or (type(value) is int and abs(value) <= _LARGEST_FLOAT)
        )
    if plain := _plain(hint):
        return lambda value: type(value) in plain
    return lambda value: isinstance(value, hint)
