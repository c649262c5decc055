"""How many batches Keras trains at once."""

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
    """Counts the steps of this process, of which Keras may take several in one call."""

    def __init__(self, model: keras.Model) -> None:
        self._replicas_here = replicas_here(model.distribute_strategy)
        self.steps = 0

    def before(self, step: ReplicaStep, batch: Any) -> Any:
        if int(tf.get_static_value(step.replica)) % self._replicas_here == 0:
            counter = weakref.ref(self)  # TensorFlow keeps what it calls, and its graphs, for good

            def count() -> np.ndarray:
                if (counts := counter()) is not None:
                    counts.steps += 1
                return np.zeros([], np.int32)

            tf.numpy_function(count, [], tf.int32)
        return batch


class Executions:
    """The executions of a `fit`, of `steps_per_execution` steps each, or of fewer where data end.

    Args:
        model: One that `fit` is about to train: this is to be made in a callback's `set_params`,
            because Keras makes the step before `on_train_begin`.
        steps: Batches in an epoch, as Keras knows them; None if it does not.
    """

    def __init__(self, model: keras.Model, steps: int | None) -> None:
        self._model = model
        self._counter: StepCounter | None = None
        # Of so many steps an epoch, Keras takes more where the data have no end.
        is_sure = steps is not None and steps % model.steps_per_execution == 0
        # Workers read data without an end.
        is_here = not is_scheduled(model.distribute_strategy)
        if is_here and not is_sure and model.steps_per_execution > 1:
            self._counter = StepInstrumentation.of(model).use_shared(StepCounter)
        self._before = 0

    def begin(self) -> None:
        """To be called from `on_train_batch_begin`."""
        if self._counter is not None:
            self._before = self._counter.steps

    def end(self) -> int:
        """How many batches were trained since, from `on_train_batch_end`."""
        if self._counter is not None:
            return self._counter.steps - self._before
        trained: int = self._model.steps_per_execution
        return trained

    def unwant(self) -> None:
        """To be called where it was not `fit` that called `set_params`."""
        if self._counter is not None:
            StepInstrumentation.of(self._model).use_none()
