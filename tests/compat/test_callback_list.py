"""Which `fit` a thread is in, seen from another one."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(60)]

import keras  # noqa: E402

from keras_distplug.compat import callback_list  # noqa: E402


class Local:
    """What a call holds for a while."""


class Training(threading.Thread):
    """Is in a `fit`, up to a word, and holds a `Local` until then."""

    def __init__(self, callback: keras.callbacks.Callback) -> None:
        super().__init__(daemon=True)
        self.callback = callback
        self.is_there, self.may_go_on, self.has_let_go = (threading.Event() for _ in range(3))
        self.may_end = threading.Event()
        self.call: callback_list.Fit | None = None
        self.local: weakref.ref[Local] | None = None

    def run(self) -> None:
        self.fit(keras.callbacks.CallbackList([self.callback]))

    def fit(self, callbacks: Any) -> None:
        self.call = callback_list.fit_with(self.callback)
        local = Local()
        self.local = weakref.ref(local)
        self.is_there.set()
        assert self.may_go_on.wait(30)
        del local
        self.has_let_go.set()
        assert self.may_end.wait(30)

    def frame(self) -> Any:
        return sys._current_frames().get(self.ident or 0)


def test_seen_from_another_thread() -> None:
    """A thread is seen to be in its own call of `fit`, as long as that lasts; and what the call
    lets go of is gone, though somebody has looked."""
    first, second = Training(keras.callbacks.Callback()), Training(keras.callbacks.Callback())
    for training in (first, second):
        training.start()
        assert training.is_there.wait(30)
    assert first.call is not None
    assert first.local is not None
    assert first.call.is_under(first.frame())
    assert not first.call.is_under(second.frame())
    assert not first.call.is_under(sys._getframe())
    first.may_go_on.set()
    assert first.has_let_go.wait(30)
    assert first.local() is None
    for training in (first, second):
        training.may_go_on.set()
        training.may_end.set()
        training.join(30)
    assert not first.call.is_under(first.frame())


def test_no_fit() -> None:
    """Outside of any `fit` there is none."""
    assert callback_list.fit_with(keras.callbacks.Callback()) is None


def test_another_frame_in_the_same_place() -> None:
    """A frame that only has the address of the one that is gone is another one."""
    training = Training(keras.callbacks.Callback())
    training.may_go_on.set()
    training.may_end.set()
    training.start()
    training.join(30)
    assert training.call is not None
    here = sys._getframe()
    assert not callback_list.Fit(training.call.callbacks, id(here)).is_under(here)
