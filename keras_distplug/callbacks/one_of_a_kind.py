"""Callbacks of which one is enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import keras

from keras_distplug.backend.tensorflow.runtime import callback_list
from keras_distplug.backend.tensorflow.runtime.attached import attach, attached

Kind = TypeVar("Kind", bound=keras.callbacks.Callback)


class _Yields:
    """That a callback yields."""


def yielding(callback: Kind) -> Kind:
    """Lets one that the user gives himself take the place of this one."""
    attach(callback, _Yields())
    return callback


def stood_aside(
    callback: keras.callbacks.Callback, others: Sequence[keras.callbacks.Callback]
) -> bool:
    """Takes `callback` out of the list if another of its class, or of one derived from that, does
    its work: the user's own, or else the last one. To be called from its `on_train_begin`."""
    rivals = [each for each in others if isinstance(each, type(callback))]
    if not rivals or (not yields(callback) and all(map(yields, rivals))):
        return False
    callback_list.leave(callback)
    return True


def yields(callback: keras.callbacks.Callback) -> bool:
    """Whether one of the user's takes its place."""
    return attached(callback, _Yields) is not None
