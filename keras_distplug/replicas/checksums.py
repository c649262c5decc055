"""Checksums of the values that should be identical on all replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import keras
import numpy as np
import xxhash

from keras_distplug.backend.tensorflow.replicas import replica_values
from keras_distplug.backend.tensorflow.runtime.workers import replicas_here
from keras_distplug.checkpoint.capture import list_variables

Checksums = Mapping[int, Mapping[str, str]]


def checksums(model: keras.Model, first_replica: int) -> Callable[[], Checksums]:
    """Captures the current values of `model` by reference.

    Args:
        model: A model on one or several replicas of this process.
        first_replica: The number of this process's first replica.

    Returns:
        A function, callable from any thread, that computes a checksum of every variable of
        `capture.list_variables`. The result maps the number of every replica with its own copy of
        the values to checksums by variable key.
    """
    parts = {name: replica_values.parts(each) for name, each in list_variables(model).items()}
    here = replicas_here(model.distribute_strategy)

    def make() -> Checksums:
        found = {}
        for place in range(here):
            own = {name: each[place] for name, each in parts.items() if place < len(each)}
            if len(own) == len(parts):
                found[first_replica + place] = {
                    name: checksum(np.asarray(value)) for name, value in own.items()
                }
        return found

    return make


def checksum(array: np.ndarray) -> str:
    flat = np.ascontiguousarray(array).reshape(-1)
    digest: str = xxhash.xxh3_64_hexdigest(flat.view(np.uint8).data)
    return digest
