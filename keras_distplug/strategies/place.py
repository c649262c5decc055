"""A model made outside a strategy's scope goes into it, and what it learned comes back.

The way in is three steps, because between the first and the second TensorFlow may have to start
afresh: `describe` reads the caller's model, `rebuild` makes its like inside the current scope,
`hand_back` writes the trained state into the caller's object.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_distplug.backend.tensorflow.runtime import models
from keras_distplug.backend.tensorflow.runtime.embedding_tables import Table, wholes
from keras_distplug.core.errors import ModelError
from keras_distplug.strategies.recompile import Recompile, recompile_of

_LOOKUPS = (keras.layers.StringLookup, keras.layers.IntegerLookup, keras.layers.TextVectorization)


@dataclass(frozen=True)
class Blueprint:
    """A compiled model, as far as it can be told without TensorFlow.

    Args:
        model: The caller's object.
        recompile: Compiles a model as the caller's is compiled.
        assets: Files of layers that have some besides their configuration, such as the vocabulary
            of a tokenizer: the bytes of each, by its path, for each of `layers_of`.
        values: The model's variables, in its order, without those of compiled metrics.
        optimizer_values: The variables of each optimizer that is built, by its name.
        optimizer_targets: What the optimizers train; see `compat.model.optimizer_targets`.
    """

    model: keras.Model
    recompile: Recompile
    assets: Sequence[Mapping[str, bytes]]
    values: Sequence[np.ndarray]
    optimizer_values: Mapping[str, Sequence[np.ndarray]]
    optimizer_targets: Mapping[str, Sequence[models.Target]]


def require_compiled(model: keras.Model, origin: str) -> None:
    if not isinstance(model, keras.Model):
        raise ModelError(
            f"distributed_fit expects a compiled keras.Model, or a function that builds and "
            f"compiles one. Received: {origin} of type {type(model).__name__}."
        )
    if not model.compiled:
        raise ModelError(
            f"The model {model.name!r} ({origin}) is not compiled. Call "
            "`model.compile(optimizer=..., loss=...)` before distributed_fit."
        )


def describe(model: keras.Model) -> Blueprint:
    """Reads everything that `rebuild` needs.

    Raises:
        ModelError: If the model is of a kind that cannot be rebuilt.
    """
    if not models.is_clonable(model):
        _require_config(model)
    for layer in models.layers_of(model):
        if isinstance(layer, _LOOKUPS):
            raise ModelError(
                f"The model {model.name!r} holds the lookup table of layer {layer.name!r} "
                f"({type(layer).__name__}), which cannot be moved into a strategy's scope. "
                "Pass a function that builds and compiles the model, "
                "`distributed_fit(build, ...)`, or do the lookup in the input pipeline."
            )
    return Blueprint(
        model=model,
        recompile=recompile_of(model),
        assets=[_assets(layer) for layer in models.layers_of(model)],
        values=[_value(variable) for variable in state_of(model)],
        optimizer_values={
            name: [_value(variable) for variable in optimizer.variables]
            for name, optimizer in models.optimizers_of(model).items()
            if optimizer.built
        },
        optimizer_targets=models.optimizer_targets(model),
    )


def rebuild(blueprint: Blueprint, from_chief: Callable[[np.ndarray], Any]) -> keras.Model:
    """Makes a model like the caller's, in its state. To be called inside the strategy's scope.

    Args:
        blueprint: From `describe`.
        from_chief: Turns one worker's array into the chief's; see `chiefs_value`.

    Raises:
        ModelError: If the result is not like the caller's model.
    """
    caller = blueprint.model
    model = _again(caller)
    _load_assets(model, blueprint.assets)
    _freeze_like(model, caller)
    blueprint.recompile(model)
    built = bool(blueprint.values)
    if built and not model.built:
        _build_like(model, caller)
    if built:
        _require_same_variables(model, caller, blueprint.values)
        for variable, value in zip(state_of(model), blueprint.values, strict=True):
            variable.assign(from_chief(value))
        _freeze_like(model, caller)  # what was built now
    if blueprint.optimizer_values:
        models.build_optimizers(model, blueprint.optimizer_targets)
        optimizers = models.optimizers_of(model)
        for name, values in blueprint.optimizer_values.items():
            for variable, value in zip(wholes(optimizers[name].variables), values, strict=True):
                variable.assign(from_chief(value))
    models.refresh(model)
    return model


def chiefs_value(value: np.ndarray) -> tf.Tensor:
    """The chief's `value`, on every worker. To be called inside the strategy's scope.

    TensorFlow broadcasts the initial value of a mirrored variable from the chief, but not what is
    assigned to one.
    """
    value = np.asarray(value)
    # The collective knows few types; these hold all values of the others.
    wide = {"f": np.float32, "V": np.float32, "u": np.int64, "i": np.int64}.get(value.dtype.kind)
    carrier = value if value.dtype in (np.float64, bool) or wide is None else value.astype(wide)
    return tf.cast(tf.Variable(carrier, trainable=False).read_value(), value.dtype)


def hand_back(blueprint: Blueprint, trained: keras.Model, *, revive: bool) -> None:
    """Writes the state of `trained` into the caller's model.

    Args:
        blueprint: From `describe`.
        trained: From `rebuild`, after training.
        revive: True if TensorFlow was started afresh since `describe`: the caller's variables are
            dead and get new ones.
    """
    caller = blueprint.model
    if revive:
        _revive(caller)
    if not blueprint.values:
        _build_like(caller, trained)
    models.build_optimizers(caller, models.optimizer_targets(trained))
    for mine, theirs in zip(_trained_state(caller), _trained_state(trained), strict=True):
        mine.assign(_value(theirs))
    models.refresh(caller)
    caller.history = getattr(trained, "history", None)
    caller.stop_training = trained.stop_training


def state_of(model: keras.Model) -> list[keras.Variable | Table]:
    """Weights and seed generators of `model`: what makes it what it is. Tables are whole."""
    metrics = {id(variable) for variable in model.metrics_variables}
    return wholes(variable for variable in model.variables if id(variable) not in metrics)


def _trained_state(model: keras.Model) -> list[keras.Variable | Table]:
    optimizers = models.optimizers_of(model)
    of_optimizers = [optimizers[name].variables for name in sorted(optimizers)]
    return [*state_of(model), *(each for variables in of_optimizers for each in wholes(variables))]


def _value(variable: keras.Variable | Table) -> np.ndarray:
    return np.asarray(variable.numpy())


def _require_config(model: keras.Model) -> None:
    try:
        model.get_config()
    except NotImplementedError as error:
        raise ModelError(
            f"The model {model.name!r} of class {type(model).__name__} was made outside the "
            "strategy's scope and cannot be made again inside it: it has no `get_config`. "
            f"Give {type(model).__name__} a `get_config` method, or pass a function that builds "
            "and compiles the model: `distributed_fit(build, ...)`."
        ) from error


def _again(caller: keras.Model) -> keras.Model:
    classes = {type(layer).__name__: type(layer) for layer in models.layers_of(caller)}
    try:
        # Keras would look into the optimizer, whose variables may be dead by now.
        with keras.saving.custom_object_scope(classes), models.without_compilation(caller):
            if models.is_clonable(caller):
                return keras.models.clone_model(caller)
            return type(caller).from_config(caller.get_config())
    except Exception as error:
        raise ModelError(
            f"The model {caller.name!r} of class {type(caller).__name__} could not be made again "
            f"inside the strategy's scope: {error}. Check `get_config` and `from_config` of its "
            "class and its layers, or pass a function that builds and compiles the model: "
            "`distributed_fit(build, ...)`."
        ) from error


def _assets(layer: keras.Layer) -> dict[str, bytes]:
    """Returns the files that Keras would put into a `.keras` file for this layer."""
    if not hasattr(layer, "save_assets"):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        layer.save_assets(folder)
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _load_assets(model: keras.Model, assets: Sequence[Mapping[str, bytes]]) -> None:
    for layer, files in zip(models.layers_of(model), assets, strict=False):
        if not files or not hasattr(layer, "load_assets"):
            continue
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            layer.load_assets(folder)


def _freeze_like(model: keras.Model, caller: keras.Model) -> None:
    """Makes trainable what is trainable in the caller's model: a configuration need not say what
    was frozen since the layers were made."""
    mine, theirs = ([each, *models.layers_of(each)] for each in (model, caller))
    if [type(layer) for layer in mine] != [type(layer) for layer in theirs]:
        return  # of models that are not built; the others are compared
    for layer, like in zip(mine, theirs, strict=True):  # a layer comes before those within it
        if layer.trainable != like.trainable:
            layer.trainable = like.trainable
    for variable, like in zip(model.weights, caller.weights, strict=False):
        if variable.trainable != like.trainable:
            variable.trainable = like.trainable


def _build_like(model: keras.Model, like: keras.Model) -> None:
    config = like.get_build_config()
    try:
        if config:
            models.build_from_config(model, config)
    except Exception as error:
        raise ModelError(
            f"The model {like.name!r} of class {type(like).__name__} could not be built inside the "
            f"strategy's scope for {config}: {error}. Pass a function that builds and compiles the "
            "model: `distributed_fit(build, ...)`."
        ) from error


def _require_same_variables(
    model: keras.Model, caller: keras.Model, values: Sequence[np.ndarray]
) -> None:
    made = [(v.path, tuple(v.shape)) for v in state_of(model)]
    wanted = [(v.path, value.shape) for v, value in zip(state_of(caller), values, strict=True)]
    if [shape for _, shape in made] != [shape for _, shape in wanted]:
        difference = next(
            (pair for pair in zip(wanted, made, strict=False) if pair[0][1] != pair[1][1]),
            (f"{len(wanted)} variables", f"{len(made)} variables"),
        )
        raise ModelError(
            f"The model {caller.name!r}, made again inside the strategy's scope, differs from the "
            f"original: expected {difference[0]}, received {difference[1]}. Its `get_config` does "
            "not say all that its variables depend on. Mend it, or pass a function that builds and "
            "compiles the model: `distributed_fit(build, ...)`."
        )


def _revive(caller: keras.Model) -> None:
    """Gives every variable of `caller` a new one to live in; their values come later."""
    for variable in models.all_variables(caller):
        models.revive(variable, np.zeros(variable.shape, variable.dtype))
    models.drop_functions(caller)
