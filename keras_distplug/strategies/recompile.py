"""Compiles a rebuilt model like the caller's original."""

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

# Attributes set by Keras' `compile` that differ between equal models.
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


def make_recompile(model: keras.Model) -> Recompile:
    """Returns a function that compiles another model in the same way as `model`.

    Optimizers and metrics are created again, since they are tied to the scope in which they were
    created. If the class overrides `compile`, its method receives the arguments that it passed to
    Keras' `compile`, and the attributes that it stored under the names of its parameters; it must
    produce the same result from these.

    Raises:
        ModelError: If the arguments of `compile` cannot be determined.
    """
    arguments = models.compile_arguments(model)  # of Keras' `compile`
    if arguments is not None and arguments.get("jit_compile") is True:
        # On a GPU, Keras stores True for its default "auto", which means False under a strategy.
        arguments = {**arguments, "jit_compile": "auto"}
    if type(model).compile is keras.Model.compile and arguments is not None:
        new_arguments = _maker_of_all(arguments)
        return lambda made: made.compile(**new_arguments())
    if type(model).compile_from_config is not keras.Model.compile_from_config:
        config = model.get_compile_config()
        return lambda made: made.compile_from_config(config)
    new_arguments = _maker_of_all(_own_arguments(model, arguments or {}))

    def recompile(made: keras.Model) -> None:
        before = dict(vars(made))
        made.compile(**new_arguments())
        _require_equivalent(made, before, model)

    return recompile


def _own_arguments(model: keras.Model, of_keras: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments for the model's own `compile`.

    Args:
        model: The caller's model.
        of_keras: The arguments that Keras' `compile` received.
    """
    parameters = inspect.signature(model.compile).parameters.values()
    more = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    names = [each.name for each in parameters if each.kind not in more]
    known = {**vars(model), **of_keras}
    for name in names:
        if name not in known or _has_variables(known[name]):
            raise _unknown(model, f"the value of its argument `{name}` is unknown")
    named = {name: known[name] for name in names}
    return named if len(names) == len(parameters) else {**of_keras, **named}


def _has_variables(value: Any) -> bool:
    """True if `value` holds a layer or variable, which is tied to the scope it was created in."""
    kinds = keras.Layer | keras.Variable
    return any(isinstance(each, kinds) for each in keras.tree.flatten(value))


def _require_equivalent(made: keras.Model, before: Mapping[str, Any], caller: keras.Model) -> None:
    """Compares the attributes that `compile` has set in `made` with those of `caller`."""
    mine = {**vars(made), **(models.compile_arguments(made) or {})}
    theirs = {**vars(caller), **(models.compile_arguments(caller) or {})}
    for name, value in mine.items():
        is_set = name not in before or before[name] is not value
        if is_set and name not in _OF_KERAS and not _is_equivalent(value, theirs.get(name)):
            raise _unknown(
                caller,
                f"a second call sets `{name}` to {value!r} instead of {theirs.get(name)!r}",
            )


def _is_equivalent(one: Any, other: Any) -> bool:
    """True if two values set by `compile` are equivalent, or cannot be compared."""
    if one is other:
        return True
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            _is_equivalent(one[key], other[key]) for key in one
        )
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_equivalent, one, other))
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
        config.pop("name", None)  # Keras appends a counter
    return config


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return bool(np.all(one == other))
    except (TypeError, ValueError):
        return False


def _unknown(model: keras.Model, why: str) -> ModelError:
    name = type(model).__name__
    return ModelError(
        f"The model {model.name!r} of class {name} overrides `compile`, and the override cannot be "
        f"called again inside the strategy's scope: {why}. Pass a function that builds and "
        f"compiles the model, `distributed_fit(build, ...)`, or implement `get_compile_config` and "
        f"`compile_from_config` in {name}."
    )


def _maker(value: Any) -> Callable[[], Any]:
    """Returns a function that returns `value`, or a new instance like it if it holds variables,
    which are tied to the scope they were created in."""
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
            f"re-created from its configuration: {error}. Register its custom parts with "
            "`@keras.saving.register_keras_serializable()`, or pass a function that builds and "
            "compiles the model: `distributed_fit(build, ...)`."
        ) from error
    return make


def _maker_of_all(arguments: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    makers = {name: keras.tree.map_structure(_maker, value) for name, value in arguments.items()}
    return lambda: {
        name: keras.tree.map_structure(lambda make: make(), each) for name, each in makers.items()
    }
