"""Checks model configs: Keras' own classes, and classes that the user has imported, are allowed.

Other people may be able to write to the folder of a config. Keras' `safe_mode` refuses lambdas, but
neither all functions that a config can name nor paths, and not in every supported version.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from keras_distplug.core.errors import ModelError

_PARTS = (
    "activations|constraints|dtype_policies|initializers|layers|losses|metrics|models|ops|"
    "optimizers|quantizers|random|regularizers"
)
_OF_KERAS = re.compile(rf"keras(\.src)?(\.({_PARTS})(\.\w+)*)?")
_FUNCTIONS_IN = ("activations", "constraints", "initializers", "losses", "metrics", "regularizers")
# These can run code from the config, or read files.
_NEVER = (
    *("Lambda", "TFSMLayer", "TorchModuleWrapper", "JaxLayer", "FlaxLayer"),
    *("__lambda__", "__typespec__"),
)
_DATA = ("__tensor__", "__numpy__", "__bytes__", "__ellipsis__", "__complex__")
_NESTED = ("__tuple__", "__slice__", "__keras_tensor__", "__set__")
_PATHS = ("vocabulary", "filepath")
_SIZES = ("units", "filters", "input_dim", "output_dim", "key_dim", "value_dim", "num_heads")
_MOST_DEEP = 100
_BASES: tuple[type, ...] = (
    keras.Layer,
    keras.Loss,
    keras.Metric,
    keras.Optimizer,
    keras.DTypePolicy,
    keras.initializers.Initializer,
    keras.regularizers.Regularizer,
    keras.constraints.Constraint,
    keras.optimizers.schedules.LearningRateSchedule,
)


def require_trusted(config: Any, elements: int) -> None:
    """Checks a config before any object is built from it.

    Args:
        config: As `keras.saving.serialize_keras_object` gives it, from JSON.
        elements: Total number of values in the arrays of the checkpoint.

    Raises:
        ModelError: If an entry is not allowed, or too large for the arrays.
    """
    _look_at(config, "model", elements, 0)


def _look_at(config: Any, where: str, elements: int, depth: int) -> None:
    if depth > _MOST_DEEP:
        raise ModelError(f"The model description is nested more than {_MOST_DEEP} deep.")
    if isinstance(config, Mapping):
        # Keras uses the same rule to distinguish objects from dictionaries.
        if {"class_name", "config"} <= config.keys() and not _is_looked_into(config, where):
            return
        for key, value in config.items():
            _check_argument(str(key), value, where, elements)
            _look_at(value, f"{where}/{key}", elements, depth + 1)
    elif isinstance(config, Sequence) and not isinstance(config, str):
        for number, value in enumerate(config):
            _look_at(value, f"{where}/{number}", elements, depth + 1)


def _is_looked_into(config: Mapping[str, Any], where: str) -> bool:
    """Returns whether the object can contain others. Raises if it is not allowed."""
    name, module = config["class_name"], config.get("module")
    registered, inner = config.get("registered_name"), config.get("config")
    if not isinstance(name, str) or not (module is None or isinstance(module, str)):
        _refuse(where, f"class {name!r} of module {module!r}: expected two strings")
    if name in _DATA:
        return False
    if name in _NEVER:
        _refuse(where, f"class {name} can run code or read files")
    if name in _NESTED or _is_registered(registered):
        return True
    if name == "function":
        if not _is_registered(inner) and not (
            module == "builtins" and _is_of_keras(inner, _FUNCTIONS_IN, callable)
        ):
            _refuse(where, f"function {inner!r} of module {module!r}")
        return False
    if _is_registered(name):
        return True
    if not name.isidentifier() or not _is_class(module, name):
        _refuse(where, f"class {name!r} of module {module!r}")
    return True


def _check_argument(key: str, value: Any, where: str, elements: int) -> None:
    if key in _PATHS and isinstance(value, str):
        _refuse(f"{where}/{key}", f"path to a file, {value!r}")
    if key in _SIZES and isinstance(value, int) and value > elements:
        _refuse(
            f"{where}/{key}",
            f"{value}, but all arrays of the checkpoint contain only {elements} values",
        )


def _refuse(where: str, what: str) -> None:
    raise ModelError(f"Entry {where} of the model description is not allowed: {what}.")


def _is_registered(name: Any) -> bool:
    return isinstance(name, str) and keras.saving.get_registered_object(name) is not None


def _is_of_keras(name: Any, parts: Sequence[str], kind: Callable[[Any], bool]) -> bool:
    if not isinstance(name, str) or not name.isidentifier():
        return False
    return any(kind(getattr(getattr(keras, part, None), name, None)) for part in parts)


def _is_class(module: str | None, name: str) -> bool:
    """Returns whether this is a class of Keras, or a model part from an imported module."""
    if module is None:
        return _is_of_keras(name, _PARTS.split("|"), lambda each: isinstance(each, type))
    found = getattr(sys.modules.get(module), name, None)
    if module.partition(".")[0] == "keras":
        # Keras itself reports classes that it does not have.
        return bool(_OF_KERAS.fullmatch(module)) and (found is None or isinstance(found, type))
    return isinstance(found, type) and issubclass(found, _BASES)
