"""Callbacks identify the `fit` that calls them."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_distplug
from keras_distplug.backend.tensorflow.input import epochs
from keras_distplug.backend.tensorflow.runtime import frames
from keras_distplug.backend.tensorflow.runtime.callback_list import Calling, move_to_end

pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]


class Thing:
    pass


def look() -> Thing:
    caller = sys._getframe(1)
    found: Thing = frames.local(caller, "thing")
    assert frames.local(caller, "nothing") is None
    return found


def test_local_variables_are_released() -> None:
    """An object that a function releases is freed, even if its local variables were read."""
    thing = Thing()
    before = weakref.ref(thing)
    assert look() is thing
    thing = Thing()
    gc.collect()
    assert before() is None
    assert look() is thing


class Looks(keras.callbacks.Callback):
    """Determines its caller in all available ways."""

    def __init__(self) -> None:
        super().__init__()
        self.calling: Calling | None = None
        self.inside: list[bool] = []

    def on_train_begin(self, logs=None):
        self.calling = Calling.now()
        move_to_end(self)

    def on_train_batch_end(self, batch, logs=None):
        assert self.calling is not None
        self.inside.append(self.calling.is_above(sys._getframe()))
        assert epochs.get_loop() is not None

    def on_epoch_end(self, epoch, logs=None):
        if logs and epoch == 2:
            raise KeyError("enough")


def model() -> keras.Model:
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made


def test_calling_fit() -> None:
    """A `fit` is identified from within until an exception ends it, and not from other threads or
    from a later `fit`."""
    looks, other = Looks(), Looks()
    x = np.zeros((6, 2))
    with pytest.raises(KeyError, match="enough"):
        model().fit(x, x[:, :1], batch_size=2, epochs=5, verbose=0, callbacks=[looks])
    assert looks.inside == [True] * 9
    assert looks.calling is not None
    assert not looks.calling.is_above(sys._getframe())
    thread = threading.Thread(target=lambda: seen.append(looks.calling.is_above(main)))
    seen, main = [], sys._current_frames()[threading.get_ident()]
    thread.start()
    thread.join(10)
    assert seen == [False]

    class Nested(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert other.calling is not None
            seen.append(other.calling.is_above(sys._getframe()))

    model().fit(x, x[:, :1], epochs=1, verbose=0, callbacks=[other])
    model().fit(x, x[:, :1], epochs=1, verbose=0, callbacks=[Nested()])
    assert seen == [False, False]


def test_frame_with_reused_address() -> None:
    """If an error keeps the list alive, another frame may get the same address; it is distinguished
    by its code."""
    still_there, frame = Thing(), sys._getframe()
    for code, is_it in ((look.__code__, False), (frame.f_code, True)):
        assert Calling(weakref.ref(still_there), id(frame), code).is_above(frame) == is_it


def test_package_code_is_not_the_users() -> None:
    """The package's code is not the user's, wherever it is installed."""
    assert str(Path(keras_distplug.__file__).parent) in frames.NOT_THE_USERS
