"""Moves a callback before or after all others, regardless of the order given by the user.

Keras 3.10 to 3.15 give a callback no access to the list that contains it. A checkpoint must include
other callbacks' state, and their changes to the model at the end of an epoch (a lowered learning
rate, restored best weights), so the callback that saves it must run last.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from types import CodeType, FrameType

import keras

from keras_distplug.backend.tensorflow.runtime import frames


@dataclass(frozen=True)
class Calling:
    """Identifies a running `fit` without keeping it alive.

    Its local variables would identify it, too. But in Python 3.11 and 3.12, reading them from
    outside (`f_locals`) keeps a copy of them. The iterator of an epoch then stays alive, and the
    next reader, possibly a signal handler, must wait for its destruction. In another thread this
    causes a segmentation fault if the function resumes and returns during the destruction.
    """

    _callbacks: weakref.ref[keras.callbacks.CallbackList]
    _frame: int
    _code: CodeType

    @classmethod
    def now(cls) -> Calling | None:
        """Returns the `fit` that calls the caller, a callback's `on_train_begin`; None if it is not
        called by a `keras.callbacks.CallbackList`."""
        frame, callbacks = _list_above(sys._getframe(1))
        if frame is None or callbacks is None:
            return None
        code = frame.f_code.co_filename
        for each in frames.callers(frame):
            if each.f_code.co_filename != code:
                return cls(weakref.ref(callbacks), id(each), each.f_code)
        return None

    def is_running(self) -> bool:
        """True if that `fit` has neither returned nor failed. Thread-safe."""
        return any(map(self.is_above, list(sys._current_frames().values())))

    def is_above(self, frame: FrameType | None) -> bool:
        """True if `frame` was called by that `fit`. Thread-safe."""
        # While the list is alive, so is the frame that holds it, and frame ids are unique. An
        # error's traceback may keep the list alive for longer, however.
        return any(
            self._callbacks() is not None and id(each) == self._frame and each.f_code is self._code
            for each in frames.callers(frame)
        )


def move_to_end(callback: keras.callbacks.Callback) -> list[keras.callbacks.Callback]:
    """Moves `callback` after all others. Call it from its `set_model` or `on_train_begin`.

    Returns:
        The others; empty if not called by a `keras.callbacks.CallbackList`.
    """
    others, calling = _others_than(callback)
    if calling is not None:
        calling.callbacks = [*others, callback]
    return others


def move_to_front(callback: keras.callbacks.Callback) -> list[keras.callbacks.Callback]:
    """Moves `callback` before all others; see `move_to_end`."""
    others, calling = _others_than(callback)
    if calling is not None:
        calling.callbacks = [callback, *others]
    return others


def leave(callback: keras.callbacks.Callback) -> None:
    """Removes `callback` from the list, so that this `fit` no longer calls it."""
    others, calling = _others_than(callback)
    if calling is not None:
        calling.callbacks = others


def _others_than(
    callback: keras.callbacks.Callback,
) -> tuple[list[keras.callbacks.Callback], keras.callbacks.CallbackList | None]:
    """Returns the other callbacks in a new list, because Keras is iterating over the old one; and
    the calling `CallbackList`."""
    _, caller = _list_above(sys._getframe(2))
    if caller is None:
        return [], None
    return [each for each in caller.callbacks if each is not callback], caller


def _list_above(
    frame: FrameType | None,
) -> tuple[FrameType | None, keras.callbacks.CallbackList | None]:
    """Returns the innermost calling frame that belongs to a `CallbackList`, and the list."""
    for each in frames.callers(frame):
        caller = frames.local(each, "self")
        if isinstance(caller, keras.callbacks.CallbackList):
            return each, caller
    return None, None
