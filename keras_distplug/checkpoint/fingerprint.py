"""What must be the same when a run goes on, besides the variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from keras_distplug.backend.tensorflow.runtime.models import layers_of, optimizers_of


def of_model(model: keras.Model) -> dict[str, Any]:
    """The classes of the model's layers and optimizers; JSON-able."""
    layers = {
        f"layer {number}": type(layer).__name__ for number, layer in enumerate(layers_of(model), 1)
    }
    optimizers = {name: type(each).__name__ for name, each in optimizers_of(model).items()}
    return {**layers, **optimizers}


def first_difference(stored: Mapping[str, Any], current: Mapping[str, Any]) -> str | None:
    """Where two differ first, in words; None if they do not."""
    for name in [*stored, *(name for name in current if name not in stored)]:
        there, here = (repr(each[name]) if name in each else "none" for each in (stored, current))
        if there != here:
            return f"`{name}` is {there} there and {here} here"
    return None
