"""How many batches Keras trains at once."""

from __future__ import annotations

import keras

from keras_distplug.backend.tensorflow.runtime.workers import is_scheduled
from keras_distplug.step.instrumentation import StepInstrumentation
from keras_distplug.step.step_counter import StepCounter


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
