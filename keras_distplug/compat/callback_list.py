"""Lets a callback run before or after all the others, wherever the user put it.

Keras 3.10 to 3.15. A callback cannot reach the list it is in; what other callbacks do to the model
at the end of an epoch (a lowered learning rate, restored best weights) belongs into the checkpoint,
and so does what they know.
"""

from __future__ import annotations

import sys
from types import FrameType

import keras


def move_to_end(callback: keras.callbacks.Callback) -> list[keras.callbacks.Callback]:
    """Moves `callback` behind all others. To be called from its `set_model` or `on_train_begin`.

    Returns:
        The others; none if no `keras.callbacks.CallbackList` is calling.
    """
    others, calling = _others_than(callback)
    if calling is not None:
        calling.callbacks = [*others, callback]
    return others


def move_to_front(callback: keras.callbacks.Callback) -> list[keras.callbacks.Callback]:
    """As `move_to_end`, before all others."""
    others, calling = _others_than(callback)
    if calling is not None:
        calling.callbacks = [callback, *others]
    return others


def leave(callback: keras.callbacks.Callback) -> None:
    """Takes `callback` out of the list: nothing more is told to it in this `fit`."""
    others, calling = _others_than(callback)
    if calling is not None:
        calling.callbacks = others


def _others_than(
    callback: keras.callbacks.Callback,
) -> tuple[list[keras.callbacks.Callback], keras.callbacks.CallbackList | None]:
    """In a new list, for Keras is iterating over the old one; and that which is calling."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.callbacks.CallbackList):
            return [each for each in caller.callbacks if each is not callback], caller
        frame = frame.f_back
    return [], None


def is_called_with(callback: keras.callbacks.Callback, frame: FrameType | None) -> bool:
    """Whether `frame`, or one of its callers, trains with this callback: has it in a
    `CallbackList` of its own."""
    while frame is not None:
        given = frame.f_locals.get("callbacks")
        if isinstance(given, keras.callbacks.CallbackList) and callback in given.callbacks:
            return True
        frame = frame.f_back
    return False
