"""The names of Keras' optimizers."""

from __future__ import annotations

import keras

_OTHERS = {"LossScaleOptimizer", "MultiOptimizer", "Optimizer"}  # wrappers and base classes

OPTIMIZERS = sorted(
    name
    for name, kind in vars(keras.optimizers).items()
    if isinstance(kind, type)
    and issubclass(kind, keras.optimizers.Optimizer)
    and name not in _OTHERS
)
