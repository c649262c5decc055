"""Compiles a model that was made again as the caller's is compiled."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from keras_distplug.backend.tensorflow.runtime import models
from keras_distplug.core.errors import ModelError

Recompile = Callable[[keras.Model], None]

# What Keras' `compile` sets that differs between equal models.
_OF_KERAS = {
    "stop_training",
    "train_function",
    "test_function",
    "predict_function",
    "_compiled_trainable_state",
    "jit_compile",
    "_jit_compile",
}
_PLAIN = (bool, int, float, str, bytes, tuple, list, dict, np.ndarray)


def recompile_of(model: keras.Model) -> Recompile:
    """Returns a function that compiles a model like `model`.

    Optimizers and metrics are made again, since these are tied to where they were made. A class
    with its own `compile` is given what that gave to Keras' `compile`, and what it stored under the
    name of a parameter; it must make the same of that.

    Raises:
        ModelError: If its arguments are not known.
    """
    arguments = models.compile_arguments(model)  # of Keras' `compile`
    if arguments is not None and arguments.get("jit_compile") is True:
        # On a GPU, Keras notes True for its default, "auto", which means False under a strategy.
        arguments = {**arguments, "jit_compile": "auto"}
    if type(model).compile is keras.Model.compile and arguments is not None:
        made_again = _maker_of_all(arguments)
        return lambda made: made.compile(**made_again())
    if type(model).compile_from_config is not keras.Model.compile_from_config:
        config = model.get_compile_config()
        return lambda made: made.compile_from_config(config)
    made_again = _maker_of_all(_own_arguments(model, arguments or {}))

    def recompile(made: keras.Model) -> None:
        before = dict(vars(made))
        made.compile(**made_again())
        _require_alike(made, before, model)

    return recompile


def _own_arguments(model: keras.Model, of_keras: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments for the model's own `compile`.

    Args:
        model: The caller's.
        of_keras: What Keras' `compile` was given.
    """
    parameters = inspect.signature(model.compile).parameters.values()
    more = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    names = [each.name for each in parameters if each.kind not in more]
    known = {**vars(model), **of_keras}
    for name in names:
        if name not in known or _has_variables(known[name]):
            raise _unknown(model, f"its argument `{name}` is not known")
    named = {name: known[name] for name in names}
    return named if len(names) == len(parameters) else {**of_keras, **named}


def _has_variables(value: Any) -> bool:
    """Returns whether it is tied to where it was made, and not made again."""
    kinds = keras.Layer | keras.Variable
    return any(isinstance(each, kinds) for each in keras.tree.flatten(value))


def _require_alike(made: keras.Model, before: Mapping[str, Any], caller: keras.Model) -> None:
    """Compares what `compile` has set in `made` with what it has set in `caller`."""
    mine = {**vars(made), **(models.compile_arguments(made) or {})}
    theirs = {**vars(caller), **(models.compile_arguments(caller) or {})}
    for name, value in mine.items():
        is_set = name not in before or before[name] is not value
        if is_set and name not in _OF_KERAS and not _is_alike(value, theirs.get(name)):
            raise _unknown(
                caller,
                f"called again it sets `{name}` to {value!r} instead of {theirs.get(name)!r}",
            )


def _is_alike(one: Any, other: Any) -> bool:
    """Returns whether two values that `compile` sets mean the same; True for what cannot be
    compared."""
    if one is other:
        return True
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_alike, one, other))
    if type(one) is not type(other) or (callable(one) and not hasattr(one, "get_config")):
        return False
    if hasattr(one, "get_config"):
        with contextlib.suppress(NotImplementedError):
            return _is_equal(_config(one), _config(other))
        return True
    return not isinstance(one, _PLAIN) or _is_equal(one, other)


def _config(value: Any) -> dict[str, Any]:
    config = dict(value.get_config())
    if isinstance(value, keras.optimizers.Optimizer):
        config.pop("name", None)  # Keras numbers them
    return config


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return bool(np.all(one == other))
    except (TypeError, ValueError):
        return False


def _unknown(model: keras.Model, why: str) -> ModelError:
    name = type(model).__name__
    return ModelError(
        f"The model {model.name!r} of class {name} has a `compile` of its own, which cannot be "
        f"called again inside the strategy's scope: {why}. Pass a function that builds and "
        f"compiles the model, `distributed_fit(build, ...)`, or give {name} the methods "
        "`get_compile_config` and `compile_from_config`."
    )


def _maker(value: Any) -> Callable[[], Any]:
    """Returns a function that returns `value`, or another one like it if it holds variables, which
    are tied to where they were made."""
    if not isinstance(value, keras.optimizers.Optimizer | keras.metrics.Metric):
        return lambda: value
    kind, config = type(value), value.get_config()
    custom = {kind.__name__: kind}
    schedule = getattr(value, "_learning_rate", None)
    if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        custom[type(schedule).__name__] = type(schedule)

    def make() -> Any:
        with keras.saving.custom_object_scope(custom):
            return kind.from_config(dict(config))

    try:
        make()
    except Exception as error:
        raise ModelError(
            f"{type(value).__name__} {value.name!r}, which the model is compiled with, cannot be "
            f"made again from its configuration: {error}. Register what it is made of with "
            "`@keras.saving.register_keras_serializable()`, or pass a function that builds and "
            "compiles the model: `distributed_fit(build, ...)`."
        ) from error
    return make


def _maker_of_all(arguments: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    makers = {name: keras.tree.map_structure(_maker, value) for name, value in arguments.items()}
    return lambda: {
        name: keras.tree.map_structure(lambda make: make(), each) for name, each in makers.items()
    }
