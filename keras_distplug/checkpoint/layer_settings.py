"""The settings of a model's layers, as hashes: rates, activations, kernel sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import keras
import xxhash

from keras_distplug.backend.tensorflow.runtime.models import layers_of

# Names count the layers of a process; seeds, weights and what is trained are compared elsewhere.
_NOT_COMPARED = frozenset(
    ("name", "seed", "trainable", "batch_shape", "build_config", "module", "registered_name")
)
_LAMBDA = "__lambda__"  # the code of a lambda, which depends on where it was written


def of_layers(model: keras.Model) -> dict[str, str]:
    """Returns a hash of the settings of each layer, by its place and its class."""
    return {
        f"layer {number} ({type(layer).__name__})": _hash_of(layer)
        for number, layer in enumerate(layers_of(model), 1)
        if not isinstance(layer, keras.Model)  # its layers follow
    }


def _hash_of(layer: keras.Layer) -> str:
    try:
        config = json.dumps(_compared(layer.get_config()), default=lambda each: type(each).__name__)
    except Exception:  # noqa: BLE001 (layers of users need no config, and may raise anything)
        config = ""
    return xxhash.xxh3_64_hexdigest(config)[:8]


def _compared(value: Any) -> Any:
    if isinstance(value, Mapping):
        if value.get("class_name") == _LAMBDA:
            return _LAMBDA
        return {
            str(name): _compared(each) for name, each in value.items() if name not in _NOT_COMPARED
        }
    if isinstance(value, list | tuple):
        return [_compared(each) for each in value]
    return value
