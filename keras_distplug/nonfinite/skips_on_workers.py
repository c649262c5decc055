"""Updates that are not finite, where workers train each for itself."""

from __future__ import annotations

import time

import keras

from keras_distplug.backend.tensorflow.parameter_server.scheduled import schedule_of

_EVERY_S = 1.0  # to ask a parameter server takes as long as a small step


class LeftOutOnWorkers:
    """Hears how many updates workers have left out. They cannot tell more: they run no Python.

    Args:
        model: One that `fit` is about to train under ParameterServerStrategy: this is to be made in
            a callback's `set_model`, because Keras makes the step before `on_train_begin`.
    """

    def __init__(self, model: keras.Model) -> None:
        self._schedule = schedule_of(model)
        self._schedule.leave_out_non_finite()
        self._told = 0
        self._asked_s = time.monotonic()

    def news(self, *, at_once: bool) -> tuple[int, int] | None:
        """How many there are since the last news, and in a row by now; None if nobody was asked.

        Args:
            at_once: Whether to ask, though that was done a moment ago.
        """
        if not at_once and time.monotonic() - self._asked_s < _EVERY_S:
            return None
        total, in_a_row = self._schedule.left_out()
        self._asked_s = time.monotonic()
        new, self._told = total - self._told, total
        return new, in_a_row

    def begin_anew(self) -> None:
        """What was in a row is so no more."""
        self._schedule.forget_left_out()
        self._told = 0
