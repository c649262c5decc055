"""How a callback of ours shows itself."""

from __future__ import annotations

import inspect
import os
import re
import signal
from collections.abc import Sequence
from typing import Any

_PASSWORD = re.compile(r"(?<=://)[^/]*:[^/]*@")
_MOST_CHARACTERS = 80  # of a value
_MISSING = object()


def as_call(self: object) -> str:
    """The call that makes `self`, with the arguments that are not their defaults.

    To be had as `__repr__`. An argument that the object does not keep under its name is left out;
    of `storage_options`, which may hold secrets, it is said only that there are some.
    """
    shown = []
    for name, parameter in inspect.signature(type(self).__init__).parameters.items():
        if name == "storage_options":
            if getattr(self, "_storage_options", None):
                shown.append(f"{name}={{...}}")
            continue
        value = getattr(self, name, _MISSING)
        if value is not _MISSING and value != parameter.default:
            shown.append(f"{name}={_shown(value)}")
    return f"{type(self).__name__}({', '.join(shown)})"


def _shown(value: Any) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str) and "://" in value:
        value = _PASSWORD.sub("", value.partition("?")[0])
    if isinstance(value, signal.Signals):
        text = value.name
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        inside = ", ".join(map(_shown, value))
        text = f"({inside}{',' * (len(value) == 1)})"
    elif callable(value):  # whose own way has an address in it
        text = getattr(value, "__qualname__", type(value).__name__)
    else:
        text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."
