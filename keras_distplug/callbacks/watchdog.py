"""What all callbacks of ours are: one is enough, and their arguments are checked and shown."""

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
from keras_distplug.core.values import Shown

_PASSWORD = re.compile(r"(?<=://)[^/]*:[^/]*@")
_MOST_CHARACTERS = 80  # of a value
_MISSING = object()


class Watchdog(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback of which one is enough in a `fit`."""

    defers = False  # whether an instance that the user gives takes its place

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if (stock := vars(cls).get("set_model")) is not None:
            cls.set_model = _of_instances(stock, cls.__name__)

    def stands_aside(self, others: Sequence[keras.callbacks.Callback]) -> bool:
        """Takes this one out of the list if another of its class, or of one derived from that, does
        its work: the user's own, or else the last one."""
        rivals = [each for each in others if isinstance(each, type(self))]
        if not rivals or (not self.defers and all(each.defers for each in rivals)):
            return False
        callback_list.leave(self)
        return True

    def __repr__(self) -> str:
        """The call that makes it, with the arguments that are not their defaults.

        An argument that it does not keep under its name is left out; of `storage_options`, which
        may hold secrets, it is said only that there are some.
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


def _of_instances(stock: Callable[..., None], name: str) -> Callable[..., None]:
    """`set_model`, the first method that Keras calls, which it also calls on a class."""

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
    """Checks that callbacks are not classes.

    Raises:
        ConfigurationError: If one is.
    """
    for each in callbacks:
        if isinstance(each, type):
            raise ConfigurationError(
                f"Expected callbacks. Received: the class {each.__name__} itself. Write "
                f"`{each.__name__}(...)`, with parentheses."
            )


Kind = TypeVar("Kind", bound=Watchdog)


def deferring(callback: Kind) -> Kind:
    """Lets one that the user gives take the place of this one."""
    callback.defers = True
    return callback


def require_ints(minimum: int, **given: object) -> None:
    """Checks arguments that are counts.

    Raises:
        ConfigurationError: If one is no int of at least `minimum`.
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
    elif isinstance(value, Shown):
        return repr(value)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        inside = ", ".join(map(_shown, value))
        text = f"({inside}{',' * (len(value) == 1)})"
    elif callable(value):  # whose own way has an address in it
        text = getattr(value, "__qualname__", type(value).__name__)
    else:
        text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."
