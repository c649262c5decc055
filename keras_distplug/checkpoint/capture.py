"""Converts a model's state to named arrays, and back."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import keras
import numpy as np

from keras_distplug.backend.tensorflow.runtime import host_memory, models
from keras_distplug.backend.tensorflow.runtime.embedding_tables import (
    Table,
    get_values,
    merge_parts,
    set_value,
)
from keras_distplug.checkpoint import callback_states, external_variables, own_states
from keras_distplug.core.errors import ModelError
from keras_distplug.storage.manifest import VariableSpec
from keras_distplug.storage.memory import Memory

_RANDOM = "random/global_seed_generator"
_OTHER_PREFIXES = (callback_states.PREFIX, external_variables.PREFIX, own_states.PREFIX)
_PLAIN = ("float16", "float32", "float64", "int32", "int64")
_LARGE = 2**18  # elements


def list_variables(model: keras.Model) -> dict[str, keras.Variable | Table]:
    """Returns weights, seed generators and optimizer variables of `model` by key, in Keras' order.
    Sharded tables are whole here.

    Variables with a separate value on every replica are skipped; see `own_states`.
    """
    metrics = {id(variable) for variable in model.metrics_variables}
    named: dict[str, keras.Variable | Table] = {}
    _add(named, "model", (v for v in model.variables if id(v) not in metrics))
    for name, optimizer in models.list_optimizers(model).items():
        _add(named, name, optimizer.variables)
    return named


def _add(
    named: dict[str, keras.Variable | Table], group: str, variables: Iterable[keras.Variable]
) -> None:
    for variable in merge_parts(variables):
        if variable.synchronization == "on_read":
            continue
        key = f"{group}/{variable.path}"
        count = 1
        while key in named:
            count += 1
            key = f"{group}/{variable.path}#{count}"
        named[key] = variable


def make_specs(model: keras.Model) -> tuple[VariableSpec, ...]:
    """Returns the specs of the values that `capture` would return."""
    return tuple(
        VariableSpec(key, tuple(variable.shape), str(variable.dtype))
        for key, variable in list_variables(model).items()
    )


def capture(model: keras.Model) -> dict[str, Any]:
    """Returns the values of everything in `list_variables`, and of Keras' global random state.

    They are references: nothing is copied here; TensorFlow copies a variable when it changes.
    """
    named = list_variables(model)
    if (generator := models.global_seed_generator()) is not None:
        named[_RANDOM] = generator.state
    return dict(zip(named, get_values(named.values()), strict=True))


def specs_of_model(stored: Iterable[VariableSpec]) -> tuple[VariableSpec, ...]:
    """Returns the part of a checkpoint that must match the model."""
    return tuple(spec for spec in stored if not _is_outside_model(spec.key))


def comparable(
    stored: Iterable[VariableSpec], model: keras.Model
) -> tuple[list[VariableSpec], list[VariableSpec]]:
    """Returns the parts of a checkpoint and of a model that must match. If the script has changed
    the learning rate between a number and a schedule, only one of them has it as a variable."""
    there, here = list(specs_of_model(stored)), list(make_specs(model))
    if any(_is_rate(spec.key) for spec in there) != any(_is_rate(spec.key) for spec in here):
        there, here = ([s for s in each if not _is_rate(s.key)] for each in (there, here))
    return there, here


def _is_rate(key: str) -> bool:
    return key.startswith("optimizer/") and key.endswith("/learning_rate")


def allocate(spec: VariableSpec) -> Memory | None:
    """Returns memory for `restore` that a variable adopts without a copy, if that pays off."""
    if spec.dtype not in _PLAIN or math.prod(spec.shape) < _LARGE:
        return None
    return Memory(*host_memory.empty_tensor(spec.shape, spec.dtype))


def restore(
    model: keras.Model, stored: Iterable[str], values: Iterable[tuple[str, Any]]
) -> dict[str, np.ndarray]:
    """Writes the values from `capture` into `model`.

    Args:
        model: A built model whose `make_specs` match.
        stored: The keys of the checkpoint, in the order of the model they are from: variables are
            matched by position, because Keras numbers names within a process.
        values: Pairs of key and value, in any order.

    Returns:
        The values that do not belong to the model as a whole, by key.
    """
    keys, here = [key for key in stored if not _is_outside_model(key)], list_variables(model)
    if any(map(_is_rate, keys)) != any(map(_is_rate, here)):
        keys = [key for key in keys if not _is_rate(key)]
        here = {key: each for key, each in here.items() if not _is_rate(key)}
    variables = dict(zip(keys, here.values(), strict=True))
    others = {}
    for key, value in values:
        if key == _RANDOM:
            models.restore_global_seed_generator(value)
        elif key.startswith(_OTHER_PREFIXES):
            others[key] = np.array(value)
        elif key in variables:
            set_value(variables[key], value)
        del value  # frees its memory for the next one
    models.refresh(model)
    return others


def assign(
    model: keras.Model,
    variables: Mapping[str, Any],
    matches: Mapping[str, str],
    values: Iterable[tuple[str, Any]],
) -> None:
    """Writes another model's values into `variables` of `model`.

    Args:
        model: The model.
        variables: The variables by key.
        matches: The variables' keys, by the keys of their values.
        values: Pairs of key and value, in any order.
    """
    for key, value in values:
        if key in matches:
            variables[matches[key]].assign(value)
        del value  # frees its memory for the next one
    models.refresh(model)


def put_back(model: keras.Model, taken: Mapping[str, Any]) -> None:
    """Writes the values that `capture` took from `model` back into it."""
    restore(model, taken.keys(), taken.items())


def how_built(
    model: keras.Model, unbuilt: Collection[str], others: Mapping[str, keras.Variable]
) -> dict[str, Any]:
    """Returns what `build` needs to make all variables of `model` without data. JSON-able.

    Args:
        model: The model in training.
        unbuilt: The `unbuilt_layers` at the start of `fit`.
        others: Variables by name outside the model that its optimizers may train.
    """
    return {
        "model": _to_json(model.get_build_config()),
        "layers": {
            place: (scopes, config)
            for place, (scopes, each) in models.build_configs(model, unbuilt).items()
            if (config := _to_json(each)) is not None
        },
        "optimizers": models.optimizer_targets(model, others),
    }


def _to_json(config: Any) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] | None = json.loads(json.dumps(config))
    except (TypeError, ValueError):
        found = None
    return found


def build(model: keras.Model, how: Mapping[str, Any]) -> None:
    """Makes the variables that `model` lacks, except those of its optimizers, in the same way as
    another model's were made.

    Args:
        model: A model that might not be built yet.
        how: The result of `how_built`.

    Raises:
        ModelError: If that is not possible.
    """
    if not model.built:
        try:
            models.build_from_config(model, how["model"] or {})
        except Exception as error:
            raise ModelError(
                f"The model {model.name!r} of class {type(model).__name__} is not built, and could "
                f"not be built with the checkpoint's build config ({how['model']}): {error}. "
                "In the training script, call `model.build(input_shape)`, or the model on one "
                "batch, before `fit`."
            ) from error
    models.build_layers(model, how.get("layers", {}))


def build_optimizers(
    model: keras.Model,
    how: Mapping[str, Any],
    find: Callable[[str], keras.Variable | None] = lambda name: None,
) -> None:
    """Makes the optimizer variables that `model`, which is built, lacks.

    Args:
        model: A model with all its weights.
        how: The result of `how_built`.
        find: Returns the variable of `how_built`'s `others` with that name, or None.
    """
    targets = itertools.chain(*how["optimizers"].values())
    places = (place for place in targets if isinstance(place, int))
    if max(places, default=-1) < len(merge_parts(model.weights)):
        models.build_optimizers(model, how["optimizers"], find)


def build_optimizer(model: keras.Model) -> None:
    """Makes the variables of the optimizer with which `model` was compiled."""
    places = {id(weight): place for place, weight in enumerate(model.weights)}
    targets = [places[id(variable)] for variable in model.trainable_variables]
    models.build_optimizers(model, {"optimizer": targets})


def _is_outside_model(key: str) -> bool:
    return key == _RANDOM or key.startswith(_OTHER_PREFIXES)
