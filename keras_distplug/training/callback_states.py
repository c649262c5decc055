"""What the other callbacks of a training know, as JSON and arrays, and back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_distplug.compat import keras_callbacks
from keras_distplug.core.errors import ConfigurationError

PREFIX = "callbacks/"
_ARRAY, _FLOAT = "__array__", "__float__"  # what stands for what JSON has not


def capture(
    callbacks: Sequence[keras.callbacks.Callback],
) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """The states of those of `callbacks` that have one.

    That is what decides how training goes on in the callbacks of Keras, and what `state_dict()`
    gives in those that have it and `load_state_dict(state)`: numbers, text, arrays, and lists and
    dicts of these.

    Returns:
        Each one's class, and its state, JSON-able; and the arrays in them by key. They are
        references.

    Raises:
        ConfigurationError: If a `state_dict()` gives something else.
    """
    states: list[dict[str, Any]] = []
    arrays: dict[str, Any] = {}
    for name, callback in named(callbacks):
        state: dict[str, Any] = {}
        key = f"{PREFIX}{name}"
        if (known := keras_callbacks.state_of(callback)) is not None:
            # Keras' callbacks do not change an array that they have.
            state["keras"] = _Encoder(name, arrays, np.asarray).encode(known, key)
        if _has_own(callback):
            state["own"] = _Encoder(name, arrays, np.array).encode(callback.state_dict(), key)
        if state:
            states.append({"callback": name, "state": state})
    return tuple(states), arrays


def restore(
    callbacks: Sequence[keras.callbacks.Callback],
    states: Sequence[Mapping[str, Any]],
    arrays: Mapping[str, np.ndarray],
    *,
    epoch: int,
    is_anew: bool,
) -> list[keras.callbacks.Callback]:
    """Gives `callbacks` what `capture` took from those of the same class, in their order.

    Args:
        callbacks: The callbacks of a training, behind their `on_train_begin`.
        states: From `capture`.
        arrays: From `capture`.
        epoch: The epoch that comes next.
        is_anew: As in `keras_callbacks.set_state`.

    Returns:
        Those that got one.
    """
    by_name = {each["callback"]: each["state"] for each in states}
    restored = []
    for name, callback in named(callbacks):
        if name not in by_name:
            continue
        state = _decode(by_name[name], arrays)
        if "keras" in state:
            keras_callbacks.set_state(callback, state["keras"], epoch=epoch, is_anew=is_anew)
        if "own" in state and _has_own(callback):
            callback.load_state_dict(state["own"])
        restored.append(callback)
    return restored


def without_state(callbacks: Sequence[keras.callbacks.Callback]) -> list[str]:
    """Names of classes that know something of their own and have no way to give it away."""
    stock = vars(keras.callbacks.Callback()).keys()
    return sorted(
        {
            type(callback).__name__
            for callback in callbacks
            if not keras_callbacks.is_of_keras(callback)
            and not type(callback).__module__.startswith("keras_distplug.")
            and keras_callbacks.state_of(callback) is None
            and not _has_own(callback)
            and vars(callback).keys() - stock
        }
    )


def named(
    callbacks: Sequence[keras.callbacks.Callback],
) -> Iterator[tuple[str, keras.callbacks.Callback]]:
    """`EarlyStopping`, `EarlyStopping#2`: the same ones in the next process."""
    counts: Counter[str] = Counter()
    for callback in callbacks:
        # What a worker leaves to the chief has its place among those of its class all the same.
        name = type(getattr(callback, "stands_for", callback)).__name__
        counts[name] += 1
        yield name if counts[name] == 1 else f"{name}#{counts[name]}", callback


def _has_own(callback: keras.callbacks.Callback) -> bool:
    return hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")


@dataclass(frozen=True)
class _Encoder:
    """Makes JSON of a state.

    Args:
        name: Of the callback.
        arrays: Where the arrays in it go.
        take: Takes an array; a copy if somebody may change it while it is written.
    """

    name: str
    arrays: dict[str, Any]
    take: Callable[[Any], np.ndarray]

    def encode(self, value: Any, key: str) -> Any:
        match value:
            case None | bool() | int() | str():
                return value
            case float() | np.floating():
                return float(value) if math.isfinite(value) else {_FLOAT: str(float(value))}
            case np.bool_() | np.integer():
                return value.item()
            case list() | tuple():
                return [self.encode(each, f"{key}/{i}") for i, each in enumerate(value)]
            case dict() if all(isinstance(k, str) and not k.startswith("__") for k in value):
                return {k: self.encode(each, f"{key}/{k}") for k, each in value.items()}
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            array = self.take(value)
            if array.dtype.kind not in "OSU":
                self.arrays[key] = array
                return {_ARRAY: key}
        raise ConfigurationError(
            f"The state of the callback {self.name} has to consist of numbers, text, arrays, and "
            "of lists and dicts of these, with text as their keys. Received, as "
            f"`{key.split('/', 2)[-1]}`: {value!r}"
        )


def _decode(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    match value:
        case {"__array__": str(key)}:
            return arrays[key]
        case {"__float__": str(text)}:
            return float(text)
        case dict():
            return {k: _decode(v, arrays) for k, v in value.items()}
        case list():
            return [_decode(v, arrays) for v in value]
    return value
