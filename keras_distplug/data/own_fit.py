"""Supports models whose class overrides `fit` to prepare the data before calling Keras' `fit`.

Such a `fit` gets the user's original arguments: it may tokenize texts, slice arrays, or split off
validation data. The data that it passes to Keras' `fit` is the data of the run; callbacks make it
resumable there, as in a plain `fit`.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras

from keras_distplug.core.errors import ConfigurationError, ModelError


def prepare(
    model: keras.Model, x: Any, y: Any, others: Mapping[str, Any], *, is_silent: bool = False
) -> Callable[[], Any]:
    """Returns a function that calls the model's own `fit`.

    Args:
        model: A model for which `models.has_own_fit` is true.
        x: The user's value.
        y: The user's value.
        others: The user's other arguments, and `callbacks`.
        is_silent: True to turn off the progress bar, if `fit` has one.

    Raises:
        ModelError: If `fit` does not accept callbacks.
        ConfigurationError: If it does not accept the user's arguments.
    """
    signature = inspect.signature(model.fit)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    name = get_name(model)
    if not takes_any and "callbacks" not in signature.parameters:
        raise ModelError(
            f"Expected {name} to take `callbacks`, which save and resume the run, and to pass them "
            f"to Keras' `fit`. Received: {name}{signature}. Add `callbacks=None` to its parameters "
            "and `callbacks=callbacks` to its call to `super().fit`."
        )
    named = dict(others)
    if is_silent and (takes_any or "verbose" in signature.parameters):
        named["verbose"] = 0
    if x is None and y is not None:
        named["y"] = y
    data = [each for each in (x, y) if each is not None] if x is not None else []
    try:
        call = signature.bind(*data, **named)
    except TypeError as error:
        raise ConfigurationError(
            f"`distributed_fit` passes its arguments on to {name}{signature}, which "
            f"does not accept them: {error}. Received: {', '.join(_shown(x, y, named))}"
        ) from error
    return functools.partial(model.fit, *call.args, **call.kwargs)


def _shown(x: Any, y: Any, named: Mapping[str, Any]) -> list[str]:
    data = [name for name, each in (("x", x), ("y", y)) if each is not None]
    return [*data, *(name for name in named if name not in ("y", "callbacks"))]


def warn_of_lost_callbacks(model: keras.Model) -> None:
    """Warns that a `fit` trained without the callbacks that it was given."""
    warnings.warn(
        f"{get_name(model)} did not pass `callbacks` to Keras' `fit`, so nothing was saved and "
        "this run cannot be resumed. Pass them on: `super().fit(..., callbacks=callbacks)`.",
        stacklevel=4,
    )


def get_name(model: keras.Model) -> str:
    """Returns the name of the model's own `fit`, for messages."""
    return f"{type(model).__name__}.fit"
