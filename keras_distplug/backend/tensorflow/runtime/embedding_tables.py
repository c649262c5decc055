"""Variables in parts, seen as a whole.

`embeddings.py` makes them: a Keras variable for each part, which optimizers, who know
nothing of it, train as a variable of its own. What looks at a model from outside (checkpoints,
files, a model outside of the scope) sees what would be there without parts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_PART = re.compile(r"\.distplug-part-(\d+)")  # an optimizer's variables have it in their paths, too


def part_name(name: str, number: int) -> str:
    return f"{name}.distplug-part-{number}"


class Table:
    """A variable whose rows are in parts, one behind the other.

    Args:
        path: That of the variable.
        parts: All of them, in the order of their rows.
    """

    def __init__(self, path: str, parts: Sequence[keras.Variable]) -> None:
        self.path = path
        self.parts = list(parts)

    @property
    def shape(self) -> tuple[int, ...]:
        first, *others = (tuple(part.shape) for part in self.parts)
        return (first[0] + sum(shape[0] for shape in others), *first[1:])

    @property
    def dtype(self) -> str:
        dtype: str = self.parts[0].dtype
        return dtype

    @property
    def synchronization(self) -> str:
        how: str = self.parts[0].synchronization
        return how

    def read(self) -> Rows:
        """The values of now, by reference."""
        return Rows([part.value.read_value() for part in self.parts])

    def assign(self, value: Any) -> None:
        value = np.asarray(value)
        if value.shape != self.shape:
            raise ValueError(f"Expected {self.path} of shape {self.shape}. Received: {value.shape}")
        begin = 0
        for part in self.parts:
            end = begin + part.shape[0]
            part.assign(value[begin:end])
            begin = end

    def numpy(self) -> np.ndarray:
        return self.read().together

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numpy(), dtype, copy=copy)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        whole = tf.concat([part.value for part in self.parts], 0, name=name)
        return whole if dtype is None else tf.cast(whole, dtype)


class Rows:
    """What a `Table` had at one time. It is fetched, and put together, when it is looked at."""

    def __init__(self, parts: Sequence[tf.Tensor]) -> None:
        self._parts = parts
        self.shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        self.dtype = np.dtype(parts[0].dtype.as_numpy_dtype)

    @functools.cached_property
    def together(self) -> np.ndarray:
        return np.concatenate([np.asarray(part) for part in self._parts])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.together, dtype, copy=copy)


def wholes(variables: Iterable[keras.Variable]) -> list[keras.Variable | Table]:
    """The parts among `variables` as one, where the first of them is."""
    found: list[keras.Variable | Table] = []
    tables: dict[str, Table] = {}
    for variable in variables:
        part = _PART.search(variable.path)
        if part is None:
            found.append(variable)
            continue
        path = _PART.sub("", variable.path)
        if part[1] == "0":  # of another one, if two have the same path
            tables[path] = Table(path, [])
            found.append(tables[path])
        tables[path].parts.append(variable)
    return found


def parts_of(variable: keras.Variable | Table) -> list[keras.Variable]:
    return variable.parts if isinstance(variable, Table) else [variable]


def value_of(variable: keras.Variable | Table) -> Any:
    """What a variable has now, by reference: anything `numpy.asarray` takes."""
    return variable.read() if isinstance(variable, Table) else variable.value.read_value()
