"""Repeats the traces of a step that an earlier process made, in their order.

Keras 3.16 calls the traced function of a step with a batch; before, with an iterator, whose batches
have no known size. So TensorFlow traces the step for the size of the first batch, and for any size
once a second one arrives. These traces differ in the last bits, and each has the Python values of
its time as constants. A resumed run may start with another batch, such as the smaller last one of
an epoch, and would trace the step for other sizes than the run that it resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_distplug.backend.tensorflow.replicas.touched import Touched
from keras_distplug.backend.tensorflow.runtime.attached import attach, attached

OnData = Callable[[Any], Any]
_Shape = tuple[int | None, ...]
_ARRAYS = (tf.Tensor, np.ndarray)


@dataclass(frozen=True)
class Request:
    """A call that had a step traced.

    Args:
        shapes: Shapes of the parts of its batch; None for a part that is not a tensor.
        values: Python values at the trace, as in `Touched.at_trace`.
    """

    shapes: tuple[_Shape | None, ...]
    values: Mapping[Any, str]


class Retraces:
    """The traces of the steps of one model that runs on a single device."""

    def __init__(self) -> None:
        self.made: dict[str, list[Request]] = {}  # by step, in this process
        self.stored: dict[str, Sequence[Request]] = {}  # to be made before the step runs
        self._making: str | None = None

    @classmethod
    def of(cls, model: keras.Model) -> Retraces:
        retraces = attached(model, cls)
        if retraces is None:
            attach(model, retraces := cls())
        return retraces

    def forget(self, step: str) -> None:
        """To be called when a step will be traced from scratch."""
        if self.made.pop(step, None) is not None:
            self.stored.pop(step, None)

    @contextmanager
    def making(self, step: str) -> Iterator[None]:
        """Names the step whose function Keras makes meanwhile."""
        self._making = step
        try:
            yield
        finally:
            self._making = None

    def converter(self, model: keras.Model) -> Callable[[OnData], OnData]:
        """Returns the `_autoconvert_optionals` of `model`, which Keras (since 3.11) passes every
        traced step to."""
        stock = model._autoconvert_optionals
        touched = Touched.of(model)

        def _autoconvert_optionals(step: OnData) -> OnData:
            converted: OnData = stock(step)
            if self._making is None or not isinstance(
                step, tf.types.experimental.PolymorphicFunction
            ):
                return converted
            return self._repeating(self._making, touched, step, converted)

        return _autoconvert_optionals

    def _repeating(self, name: str, touched: Touched, function: Any, converted: OnData) -> OnData:
        def on_data(data: Any) -> Any:
            if not tf.executing_eagerly():  # within a function of an iterator
                return converted(data)
            if (stored := self.stored.pop(name, None)) is not None:
                self._repeat(name, stored, data, touched, function)
            traces = function.experimental_get_tracing_count()
            found = converted(data)
            if function.experimental_get_tracing_count() > traces:
                self._note(
                    Request(tuple(map(_get_shape, tf.nest.flatten(data))), {}), name, touched
                )
            return found

        return on_data

    def _repeat(
        self, name: str, stored: Sequence[Request], data: Any, touched: Touched, function: Any
    ) -> None:
        made = {each.shapes for each in self.made.get(name, ())}
        for request in stored:
            if request.shapes in made:
                continue
            specs = _specs(data, request.shapes)
            if specs is None:  # the script has changed its data
                return
            touched.stored[name] = request.values
            function.get_concrete_function(specs)
            self._note(request, name, touched)
        touched.stored.pop(name, None)  # later traces use the values at their time

    def _note(self, request: Request, name: str, touched: Touched) -> None:
        values = touched.at_trace.get(name, {})
        self.made.setdefault(name, []).append(Request(request.shapes, values))


def _get_shape(part: Any) -> _Shape | None:
    if isinstance(part, _ARRAYS):
        return tuple(part.shape)
    if isinstance(part, tf.RaggedTensor | tf.SparseTensor):
        return tuple(part.shape.as_list())
    return None


def _specs(data: Any, shapes: Sequence[_Shape | None]) -> Any:
    """Returns the specs of a batch like `data` with other shapes, or None."""
    parts = tf.nest.flatten(data)
    if len(parts) != len(shapes):
        return None
    specs = [_spec(part, shape) for part, shape in zip(parts, shapes, strict=True)]
    return None if NotImplemented in specs else tf.nest.pack_sequence_as(data, specs)


def _spec(part: Any, shape: _Shape | None) -> Any:
    if part is None or isinstance(part, tf.experimental.Optional):
        return None  # Keras converts an empty optional
    if shape is None:
        return NotImplemented
    if isinstance(part, tf.RaggedTensor):
        return tf.RaggedTensorSpec(shape, part.dtype, part.ragged_rank, part.row_splits.dtype)
    if isinstance(part, tf.SparseTensor):
        return tf.SparseTensorSpec(shape, part.dtype)
    return tf.TensorSpec(shape, part.dtype) if isinstance(part, _ARRAYS) else NotImplemented
