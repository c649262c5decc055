"""Memory for variables that are being read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keras_distplug.storage.manifest import VariableSpec


@dataclass(frozen=True)
class Memory:
    """The memory for one variable.

    Args:
        value: The variable's value for the reader: anything that `numpy.asarray` accepts.
        data: Its bytes in row-major order, to write to.
    """

    value: Any
    data: memoryview


# Returns None for a variable that may be read into a NumPy array.
Allocate = Callable[[VariableSpec], Memory | None]
