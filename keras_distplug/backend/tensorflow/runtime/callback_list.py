"""Lets a callback run before or after all the others, wherever the user put it.

Keras 3.10 to 3.15. A callback cannot reach the list it is in; what other callbacks do to the model
at the end of an epoch (a lowered learning rate, restored best weights) belongs into the checkpoint,
and so does what they know.
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
    """A `fit` that calls its callbacks, told from others without keeping it alive.

    Its local variables would tell, too. But to look at them from outside (`f_locals`) makes Python
    3.11 and 3.12 keep them as they are then: the iterator of an epoch lives on, and whoever looks
    next is the one who waits for its end, be that in the handler of a signal. From another thread
    it is a segfault where that end lets the function go on, and return.
    """

    _callbacks: weakref.ref[keras.callbacks.CallbackList]
    _frame: int
    _code: CodeType

    @classmethod
    def now(cls) -> Calling | None:
        """To be called from a callback's `on_train_begin`; None if no list of Keras' calls that."""
        frame, callbacks = _list_above(sys._getframe(1))
        if frame is None or callbacks is None:
            return None
        code = frame.f_code.co_filename
        for each in frames.callers(frame):
            if each.f_code.co_filename != code:
                return cls(weakref.ref(callbacks), id(each), each.f_code)
        return None

    def is_running(self) -> bool:
        """Whether that `fit` has neither returned nor failed. From any thread."""
        return any(map(self.is_above, list(sys._current_frames().values())))

    def is_above(self, frame: FrameType | None) -> bool:
        """Whether `frame` is called by that `fit`. From any thread."""
        # While the list lives, so does the frame that has it, whose number no other one can have;
        # but an error may leave the list to somebody else.
        return any(
            self._callbacks() is not None and id(each) == self._frame and each.f_code is self._code
            for each in frames.callers(frame)
        )


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
    _, caller = _list_above(sys._getframe(2))
    if caller is None:
        return [], None
    return [each for each in caller.callbacks if each is not callback], caller


def _list_above(
    frame: FrameType | None,
) -> tuple[FrameType | None, keras.callbacks.CallbackList | None]:
    """Which list calls, and its frame."""
    for each in frames.callers(frame):
        caller = frames.local(each, "self")
        if isinstance(caller, keras.callbacks.CallbackList):
            return each, caller
    return None, None
