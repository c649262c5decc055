"""Detects weights added to a model while it trains."""

from __future__ import annotations

import keras

from keras_distplug.core.log import announce


class NewWeights:
    """Reports weights that the model did not have when its step was first traced.

    Args:
        model: The model in training.
        is_chief: True if this worker reports.
    """

    def __init__(self, model: keras.Model, *, is_chief: bool) -> None:
        self._model = model
        self._is_chief = is_chief
        self._weights: dict[int, keras.Variable] | None = None  # at the last trace of the step

    def report(self) -> None:
        """Must be called whenever the training step is traced."""
        weights = {id(each): each for each in self._model.weights}
        new = [] if self._weights is None else weights.keys() - self._weights.keys()
        self._weights = weights
        if new and self._is_chief:
            paths = sorted(weights[each].path for each in new)
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            announce(
                f"weights were added to the model during training (`{paths[0]}`{more}): after a "
                "restart, this script cannot resume from checkpoints saved from now on. Create "
                "all weights before `fit`"
            )
