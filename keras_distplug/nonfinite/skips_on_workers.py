"""Non-finite updates under ParameterServerStrategy, where workers train asynchronously."""

from __future__ import annotations

import time

import keras

from keras_distplug.backend.tensorflow.parameter_server.scheduled import get_schedule

_EVERY_S = 1.0  # a request to a parameter server takes as long as a small step


class WorkerSkips:
    """Counts the updates that workers have skipped. They cannot report more: they run no Python.

    Args:
        model: A model that `fit` is about to train under ParameterServerStrategy. Create this
            object in a callback's `set_model`, because Keras builds the step before
            `on_train_begin`.
    """

    def __init__(self, model: keras.Model) -> None:
        self._schedule = get_schedule(model)
        self._schedule.skip_non_finite()
        self._reported = 0
        self._polled_s = time.monotonic()

    def poll(self, *, force: bool) -> tuple[int, int] | None:
        """Returns the numbers of skips since the last call and of consecutive skips so far; None if
        the servers were not asked.

        Args:
            force: If `True`, ask even if less than a second has passed since the last request.
        """
        if not force and time.monotonic() - self._polled_s < _EVERY_S:
            return None
        total, in_a_row = self._schedule.count_skipped()
        self._polled_s = time.monotonic()
        new, self._reported = total - self._reported, total
        return new, in_a_row

    def reset(self) -> None:
        """Resets the counts."""
        self._schedule.reset_skipped()
        self._reported = 0
