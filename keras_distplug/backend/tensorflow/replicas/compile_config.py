"""The compile configuration of a model, and its frozen layers and weights.

Keras 3.10 to 3.15: `_compile_config` holds the arguments of `compile`; every call creates a new
object.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_distplug.backend.tensorflow.runtime.models import compile_arguments, list_layers

Config = Mapping[str, Any]
Frozen = Mapping[str, Sequence[int]]


def frozen(model: keras.Model) -> dict[str, list[int]]:
    """Returns the positions of the layers and weights that are not trained."""
    layers = (model, *list_layers(model))
    return {
        "layers": [place for place, layer in enumerate(layers) if not layer._trainable],
        "weights": [place for place, each in enumerate(model.weights) if not each.trainable],
    }


def freeze(model: keras.Model, places: Frozen) -> None:
    """Freezes and unfreezes layers and weights so that `frozen(model)` equals `places`."""
    layers, weights = set(places["layers"]), set(places["weights"])
    for place, layer in enumerate((model, *list_layers(model))):  # a layer precedes its sublayers
        is_trained = place not in layers
        if layer._trainable != is_trained:
            layer.trainable = is_trained
    for place, weight in enumerate(model.weights):
        is_trained = place not in weights
        if weight.trainable != is_trained:
            weight.trainable = is_trained


def identity(model: keras.Model) -> Any:
    """Returns an object that is replaced by every call of `compile`."""
    return getattr(model, "_compile_config", None)


def config(model: keras.Model) -> Config | None:
    """Returns the JSON-serializable configuration that the model is compiled with; None if Keras
    cannot serialize it."""
    if type(model).compile is not keras.Model.compile:
        return None  # an override may accept and store anything
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            serialized: dict[str, Any] = json.loads(json.dumps(identity(model).serialize()))
            optimizer = keras.saving.serialize_keras_object(model.optimizer)
            serialized["optimizer"] = json.loads(json.dumps(optimizer))
    except Exception:  # noqa: BLE001 (a user's `get_config` may raise anything)
        return None
    return serialized


def are_alike(one: Config | None, other: Config | None) -> bool:
    """True if two configurations are equal apart from values that training changes and names that
    Keras numbers."""
    return bool(_lasting(one) == _lasting(other))


def _lasting(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    is_rate = isinstance(value.get("learning_rate"), float)  # a variable, which is restored
    left_out = {"name", "learning_rate"} if is_rate else {"name"}
    return {key: _lasting(each) for key, each in value.items() if key not in left_out}


def compile_like(model: keras.Model, there: Config) -> None:
    """Compiles `model` with the configuration of another, keeping its own objects if they match.

    Raises:
        Exception: Any exception of Keras if it cannot deserialize `there`.
    """
    here, arguments = config(model) or {}, dict(compile_arguments(model) or {})
    arguments["optimizer"] = model.optimizer
    for name, serialized in there.items():
        if not are_alike({name: here.get(name)}, {name: serialized}):
            arguments[name] = keras.saving.deserialize_keras_object(serialized)
    _compile(model, arguments)


def renew_optimizer(model: keras.Model) -> keras.optimizers.Optimizer:
    """Replaces the optimizer of `model` by an unbuilt copy. Returns the previous one."""
    before = model.optimizer
    arguments = {
        **(compile_arguments(model) or {}),
        "optimizer": type(before).from_config(before.get_config()),
    }
    _compile(model, arguments)
    return before


def copy_slots(before: keras.optimizers.Optimizer, after: keras.optimizers.Optimizer) -> None:
    """Copies the values of one optimizer's variables to those of another with the same names."""
    known = {variable.name: variable for variable in before.variables}
    for variable in after.variables:
        if variable.name in known and variable.shape == known[variable.name].shape:
            variable.assign(known[variable.name])


def _compile(model: keras.Model, arguments: Mapping[str, Any]) -> None:
    with model.distribute_strategy.scope():
        keras.Model.compile(model, **arguments)  # a user's override may have other parameters
    model.make_train_function()
