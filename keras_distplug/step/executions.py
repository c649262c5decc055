"""Counts the batches that Keras trains per execution."""

from __future__ import annotations

import weakref
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_distplug.backend.tensorflow.runtime.workers import is_scheduled, replicas_here
from keras_distplug.step.instrumentation import StepInstrument, StepInstrumentation
from keras_distplug.step.replica_step import ReplicaStep


class StepCounter(StepInstrument):
    """Counts the steps of this process; Keras may run several in one call."""

    def __init__(self, model: keras.Model) -> None:
        self._replicas_here = replicas_here(model.distribute_strategy)
        self.steps = 0

    def before(self, step: ReplicaStep, batch: Any) -> Any:
        if int(tf.get_static_value(step.replica)) % self._replicas_here == 0:
            # Weak, because TensorFlow never releases graphs and the functions they call.
            counter = weakref.ref(self)

            def count() -> np.ndarray:
                if (counts := counter()) is not None:
                    counts.steps += 1
                return np.zeros([], np.int32)

            tf.numpy_function(count, [], tf.int32)
        return batch


class Executions:
    """The executions of a `fit`: `steps_per_execution` steps each, or fewer when the data ends.

    Args:
        model: The model that `fit` is about to train. Create this object in a callback's
            `set_params`, because Keras builds the step before `on_train_begin`.
        steps: The number of batches per epoch; None if Keras does not know it.
    """

    def __init__(self, model: keras.Model, steps: int | None) -> None:
        self._model = model
        self._counter: StepCounter | None = None
        # With a `steps` that is not a multiple, Keras runs full executions if the data continues.
        is_sure = steps is not None and steps % model.steps_per_execution == 0
        # Under a parameter server strategy, workers read endless data.
        is_here = not is_scheduled(model.distribute_strategy)
        if is_here and not is_sure and model.steps_per_execution > 1:
            self._counter = StepInstrumentation.of(model).use_shared(StepCounter)
        self._before = 0

    @property
    def batches_each(self) -> int | None:
        """The number of batches of an execution; None if `begin` and `end` have to count them.

        Otherwise, hooks need not call these, which would take a noticeable part of a short step.
        """
        if self._counter is not None:
            return None
        number: int = self._model.steps_per_execution  # a callback may compile the model again
        return number

    def begin(self) -> None:
        """Call it from `on_train_batch_begin`."""
        if self._counter is not None:
            self._before = self._counter.steps

    def end(self) -> int:
        """Returns the number of batches trained since `begin`. Call in `on_train_batch_end`."""
        if self._counter is not None:
            return self._counter.steps - self._before
        trained: int = self._model.steps_per_execution
        return trained

    def disable_counting(self) -> None:
        """Cancels the counting. Call it if `set_params` was not called by `fit`."""
        if self._counter is not None:
            StepInstrumentation.of(self._model).use_none()
