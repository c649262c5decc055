"""The settings of a model's layers: rates, activations, strides, regularizers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any

import keras

from keras_distplug.backend.tensorflow.runtime.models import list_layers

Setting = bool | int | float | str
# Names contain a per-process count; seeds and the trainable state are compared elsewhere.
_NOT_COMPARED = frozenset(("name", "seed", "trainable", "dtype", "filepath"))
_UNDECIDED = -1  # replaced when the layer is built


def get_layer_settings(model: keras.Model) -> dict[str, dict[str, Setting]]:
    """Returns the settings of Keras' own layers, by place and class.

    They are read from attributes. A config would copy constants, serialize code, and contain names
    with a per-process count.
    """
    # A `Sequential` gets an input layer when it is built.
    layers = [each for each in list_layers(model) if not isinstance(each, keras.layers.InputLayer)]
    return {
        f"layer {number} ({type(layer).__name__})": _get_settings(layer)
        for number, layer in enumerate(layers, 1)
        if type(layer).__module__.partition(".")[0] == "keras"
    }


def _get_settings(layer: keras.Layer) -> dict[str, Setting]:
    kind: Any = type(layer)
    held = vars(layer)
    found = {name: _plain(held[name]) for name in _arguments(kind) if name in held}
    settings = {name: value for name, value in found.items() if value is not None}
    return {**settings, "dtype": str(layer.dtype_policy.name)}


def _plain(value: Any) -> Setting | None:
    if inspect.isfunction(value):  # an activation
        name = value.__name__
        return None if name == "<lambda>" else name
    if isinstance(value, keras.Regularizer | keras.constraints.Constraint):
        return f"{type(value).__name__}({_joined(vars(value).values())})"
    if isinstance(value, tuple | list):
        return f"({_joined(value)})"
    if type(value) not in (bool, int, float, str) or value == _UNDECIDED:
        return None
    plain: Setting = value
    return plain


def _joined(values: Iterable[Any]) -> str:
    return ", ".join(str(each) for each in map(_plain, values))


@functools.cache
def _arguments(kind: Any) -> tuple[str, ...]:
    names = inspect.signature(kind.__init__).parameters
    return tuple(name for name in names if name not in _NOT_COMPARED)
