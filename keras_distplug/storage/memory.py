"""Memory that variables are read into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keras_distplug.storage.manifest import VariableSpec


@dataclass(frozen=True)
class Memory:
    """Memory of one variable.

    Args:
        value: What the reader gets: anything `numpy.asarray` takes.
        data: Its bytes in row-major order, to write to.
    """

    value: Any
    data: memoryview


# None for a variable that may be read into a NumPy array.
Allocate = Callable[[VariableSpec], Memory | None]
