"""Data from a function that is called for each worker, with its `tf.distribute.InputContext`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_distplug.backend.tensorflow.input import readers
from keras_distplug.core.errors import DataError
from keras_distplug.data.sources import TfData

Make = Callable[[tf.distribute.InputContext], tf.data.Dataset]


def takes_context(x: Any) -> bool:
    """Whether `x` is a function that wants one argument."""
    if not callable(x) or isinstance(x, tf.data.Dataset):
        return False
    try:
        parameters = inspect.signature(x).parameters.values()
    except (TypeError, ValueError):  # of a class of C, such as that of generators
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in kinds and each.default is each.empty for each in parameters) == 1


class DatasetFunction(TfData):
    """What a function of an `InputContext` returns.

    Where one process reads the data, and splits global batches, it is called for the only input
    pipeline that there is. Where each worker reads for itself, it is called once for each of them,
    in the chief's process, and what it makes is made on the workers.

    Args:
        make: The user's.
        seed: As in `TfData`.
        class_weight: As in `Model.fit`.
    """

    def __init__(self, make: Make, seed: int, class_weight: dict[int, float] | None = None) -> None:
        self._make = make
        self._class_weight = class_weight
        super().__init__(self._of(0, 1), seed)

    def of_worker(self, worker: tf.Tensor, workers: int, seed: tf.Tensor) -> tf.data.Dataset:
        def variant_of(number: int) -> Callable[[], tf.Tensor]:
            return lambda: tf.data.experimental.to_variant(self._of(number, workers))

        variant = tf.switch_case(
            tf.cast(worker, tf.int32), [variant_of(number) for number in range(workers)]
        )
        return tf.data.experimental.from_variant(variant, self.whole.element_spec)

    def _of(self, number: int, pipelines: int) -> tf.data.Dataset:
        made = self._make(tf.distribute.InputContext(pipelines, number))
        if not isinstance(made, tf.data.Dataset):
            raise DataError(
                "Expected the function given as `x`, which takes a tf.distribute.InputContext, to "
                f"return a tf.data.Dataset. Received: {type(made).__name__}."
            )
        return readers.class_weighted(made, self._class_weight)
