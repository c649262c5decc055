"""Looks up names of a model's config in Keras and in the user's imported modules."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import keras

from keras_distplug.backend.tensorflow.runtime.keras_files import Kind

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


class ImportedNames:
    """The names known in this process, as `trusted_config.Names` requires."""

    def kind(self, module: str, name: str) -> Kind | None:
        """Returns the kind of an object of Keras; private modules count only their definitions."""
        found = _defined(module).get(name)
        if module.startswith("keras.src.") and getattr(found, "__module__", None) != module:
            return None
        if isinstance(found, type):
            return "class"
        return "function" if inspect.isfunction(found) else None

    def is_registered(self, name: str) -> bool:
        return keras.saving.get_registered_object(name) is not None

    def is_imported(self, module: str, name: str) -> bool:
        found = _defined(module).get(name)
        return isinstance(found, type) and issubclass(found, _BASES)


def _defined(module: str) -> Mapping[str, Any]:
    # `getattr` would also find attributes of every module, such as `__class__`.
    return vars(sys.modules[module]) if module in sys.modules else {}
