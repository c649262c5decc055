"""Lets a callback run after all the others, wherever the user put it.

Keras 3.10 to 3.15. A callback cannot reach the list it is in; what other callbacks do to the model
at the end of an epoch (a lowered learning rate, restored best weights) belongs into the checkpoint.
"""

from __future__ import annotations

import sys
from types import FrameType

import keras


def move_to_end(callback: keras.callbacks.Callback) -> bool:
    """Moves `callback` behind all others. To be called from its `set_model`.

    Returns:
        False if no `keras.callbacks.CallbackList` is calling.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.callbacks.CallbackList):
            # A new list: Keras is iterating over the old one.
            caller.callbacks = [*(c for c in caller.callbacks if c is not callback), callback]
            return True
        frame = frame.f_back
    return False
