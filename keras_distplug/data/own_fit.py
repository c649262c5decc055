"""Models whose class has its own `fit`, which prepares the data and then calls Keras'.

Such a `fit` gets its arguments as the user gave them: it may tokenize texts, slice arrays, or split
off validation data. What it gives to Keras' `fit` is the data of the run; callbacks make that
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
        x: As the user gave it.
        y: As the user gave it.
        others: The other arguments that the user gave, and `callbacks`.
        is_silent: Turn the progress bar off, if `fit` has one.

    Raises:
        ModelError: If `fit` takes no callbacks.
        ConfigurationError: If it does not take what the user gave.
    """
    signature = inspect.signature(model.fit)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    name = name_of(model)
    if not takes_any and "callbacks" not in signature.parameters:
        raise ModelError(
            f"Expected {name} to take `callbacks`, which save and resume the run, and to pass them "
            f"to Keras' `fit`. Received: {name}{signature}. Add `callbacks=None` to its parameters "
            "and `callbacks=callbacks` to its call of `super().fit`."
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
            f"Expected the arguments of {name}{signature}, which `distributed_fit` calls with what "
            f"it was given. Received: {', '.join(_shown(x, y, named))}: {error}."
        ) from error
    return functools.partial(model.fit, *call.args, **call.kwargs)


def _shown(x: Any, y: Any, named: Mapping[str, Any]) -> list[str]:
    data = [name for name, each in (("x", x), ("y", y)) if each is not None]
    return [*data, *(name for name in named if name not in ("y", "callbacks"))]


def warn_of_lost_callbacks(model: keras.Model) -> None:
    """Warns of a `fit` that has trained without the callbacks that it was given."""
    warnings.warn(
        f"{name_of(model)} did not pass `callbacks` to Keras' `fit`, so nothing was saved and this "
        "run cannot be resumed. Pass them on: `super().fit(..., callbacks=callbacks)`.",
        stacklevel=4,
    )


def name_of(model: keras.Model) -> str:
    """The name of the model's own `fit`, for messages."""
    return f"{type(model).__name__}.fit"
