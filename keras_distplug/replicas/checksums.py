"""What is the same on all replicas, as long as nothing goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import keras
import numpy as np
import xxhash

from keras_distplug.backend.tensorflow.replicas import replica_values
from keras_distplug.backend.tensorflow.runtime.workers import replicas_here
from keras_distplug.checkpoint.capture import variables_of

Checksums = Mapping[int, Mapping[str, str]]


def checksums(model: keras.Model, first_replica: int) -> Callable[[], Checksums]:
    """Takes the values that `model` has now, by reference.

    Args:
        model: On one or several replicas of this process.
        first_replica: The number of the first of these.

    Returns:
        What makes, from any thread, a checksum of each of `capture.variables_of`, by its key, for
        each replica that has values of its own, by its number.
    """
    parts = {name: replica_values.parts(each) for name, each in variables_of(model).items()}
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
