"""The base class of the package's callbacks, with checks of their arguments."""

from __future__ import annotations

import functools
import inspect
import os
import re
import signal
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras

from keras_distplug.backend.tensorflow.runtime import callback_list
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.values import ShortRepr

_PASSWORD = re.compile(r"(?<=://)[^/]*:[^/]*@")
_MOST_CHARACTERS = 80  # per value
_MISSING = object()


class Watchdog(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback of which only one instance is active in a `fit`."""

    defers = False  # True if an instance passed by the user replaces this one

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if (stock := vars(cls).get("set_model")) is not None:
            cls.set_model = _refuse_classes(stock, cls.__name__)

    def defers_to_other(self, others: Sequence[keras.callbacks.Callback]) -> bool:
        """Removes this callback from the list, and returns True, if another instance of its class
        or of a subclass does the work: one passed by the user, or else the last one."""
        rivals = [each for each in others if isinstance(each, type(self))]
        if not rivals or (not self.defers and all(each.defers for each in rivals)):
            return False
        callback_list.leave(self)
        return True

    def __repr__(self) -> str:
        """Returns the constructor call, with all arguments that differ from their defaults.

        Arguments that are not stored under their own names are omitted. The values of
        `storage_options` are hidden, because they may contain secrets.
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


def _refuse_classes(stock: Callable[..., None], name: str) -> Callable[..., None]:
    """Wraps `set_model` to raise an error if it is called on a class instead of an instance.

    It is the first method that Keras calls.
    """

    @functools.wraps(stock)
    def set_model(self: Any, *given: Any, **named: Any) -> None:
        if not isinstance(self, keras.callbacks.Callback):
            raise ConfigurationError(
                f"Expected callbacks. Received: the class {name} itself. Write "
                f"`callbacks=[{name}(...)]`, with parentheses."
            )
        stock(self, *given, **named)

    return set_model


def require_made(callbacks: Sequence[object]) -> None:
    """Checks that callbacks are instances, not classes.

    Raises:
        ConfigurationError: If one is a class.
    """
    for each in callbacks:
        if isinstance(each, type):
            raise ConfigurationError(
                f"Expected callbacks. Received: the class {each.__name__} itself. Write "
                f"`{each.__name__}(...)`, with parentheses."
            )


Kind = TypeVar("Kind", bound=Watchdog)


def deferring(callback: Kind) -> Kind:
    """Marks `callback` as a default, which an instance passed by the user replaces."""
    callback.defers = True
    return callback


def require_ints(minimum: int, **given: object) -> None:
    """Checks arguments that are counts.

    Raises:
        ConfigurationError: If one is not an int of at least `minimum`.
    """
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigurationError(
                f"Expected `{name}` to be an int >= {minimum}. Received: {value!r}"
            )


def _shown(value: Any) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str) and "://" in value:
        value = _PASSWORD.sub("", value.partition("?")[0])
    if isinstance(value, signal.Signals):
        text = value.name
    elif isinstance(value, ShortRepr):
        return repr(value)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        inside = ", ".join(map(_shown, value))
        text = f"({inside}{',' * (len(value) == 1)})"
    elif callable(value):  # its `repr` would contain a memory address
        text = getattr(value, "__qualname__", type(value).__name__)
    else:
        text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."
