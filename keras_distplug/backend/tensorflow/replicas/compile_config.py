"""How a model is compiled, and what of it is frozen.

Keras 3.10 to 3.15: `_compile_config` holds the arguments of `compile`, and each call makes a new
one.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_distplug.backend.tensorflow.runtime.models import compile_arguments, layers_of

Config = Mapping[str, Any]
Frozen = Mapping[str, Sequence[int]]


def frozen(model: keras.Model) -> dict[str, list[int]]:
    """The places of the layers and of the weights that are not trained."""
    layers = (model, *layers_of(model))
    return {
        "layers": [place for place, layer in enumerate(layers) if not layer._trainable],
        "weights": [place for place, each in enumerate(model.weights) if not each.trainable],
    }


def freeze(model: keras.Model, places: Frozen) -> None:
    """Makes `frozen(model)` what `places` says."""
    for place, layer in enumerate((model, *layers_of(model))):  # a layer before those within it
        is_trained = place not in places["layers"]
        if layer._trainable != is_trained:
            layer.trainable = is_trained
    for place, weight in enumerate(model.weights):
        is_trained = place not in places["weights"]
        if weight.trainable != is_trained:
            weight.trainable = is_trained


def identity(model: keras.Model) -> Any:
    """Another object after each call of `compile`."""
    return getattr(model, "_compile_config", None)


def config(model: keras.Model) -> Config | None:
    """What the model is compiled with, JSON-able; None if Keras cannot tell."""
    if type(model).compile is not keras.Model.compile:
        return None  # which may take, and keep, anything
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            told: dict[str, Any] = json.loads(json.dumps(identity(model).serialize()))
            optimizer = keras.saving.serialize_keras_object(model.optimizer)
            told["optimizer"] = json.loads(json.dumps(optimizer))
    except Exception:  # noqa: BLE001 (a `get_config` of the user's raises what it likes)
        return None
    return told


def are_alike(one: Config | None, other: Config | None) -> bool:
    """Are two configs the same, but for what training changes and what Keras counts up?"""
    return bool(_lasting(one) == _lasting(other))


def _lasting(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    is_rate = isinstance(value.get("learning_rate"), float)  # a variable, which is restored
    left_out = {"name", "learning_rate"} if is_rate else {"name"}
    return {key: _lasting(each) for key, each in value.items() if key not in left_out}


def compile_like(model: keras.Model, there: Config) -> None:
    """Compiles `model` as another one was, with its own objects where they are alike.

    Raises:
        Exception: Any, if Keras cannot make what is in `there`.
    """
    here, arguments = config(model) or {}, dict(compile_arguments(model) or {})
    arguments["optimizer"] = model.optimizer
    for name, told in there.items():
        if not are_alike({name: here.get(name)}, {name: told}):
            arguments[name] = keras.saving.deserialize_keras_object(told)
    _compile(model, arguments)


def renew_optimizer(model: keras.Model) -> keras.optimizers.Optimizer:
    """Gives `model` an optimizer that is not built, like the one that it has. Returns that one."""
    before = model.optimizer
    arguments = {
        **(compile_arguments(model) or {}),
        "optimizer": type(before).from_config(before.get_config()),
    }
    _compile(model, arguments)
    return before


def copy_slots(before: keras.optimizers.Optimizer, after: keras.optimizers.Optimizer) -> None:
    """Gives the variables of one optimizer the values of those of another with the same name."""
    known = {variable.name: variable for variable in before.variables}
    for variable in after.variables:
        if variable.name in known and variable.shape == known[variable.name].shape:
            variable.assign(known[variable.name])


def _compile(model: keras.Model, arguments: Mapping[str, Any]) -> None:
    with model.distribute_strategy.scope():
        keras.Model.compile(model, **arguments)  # a `compile` of the user's may take others
    model.make_train_function()
