"""Reports events to listeners in this process.

As with `logging`, the reporting code does not know the listener: every callback works on its own
and together with others.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from keras_distplug.core.events import Event
from keras_distplug.core.ledger import Category


class Listener(Protocol):
    """Receives events. Its methods must not raise, nor wait for storage."""

    def on_event(self, event: Event) -> None:
        """Receives an event. May be called from any thread."""
        ...

    def spent(self, category: Category, secs: float) -> None:
        """Receives the last `secs` seconds' category. Called from the training thread."""
        ...


# Weak references: an error may end a `fit` without removing its listener, which must not keep a
# model in memory.
_listeners: tuple[weakref.ref[Listener], ...] = ()


def listen(listener: Listener) -> None:
    """Sends all reports to `listener` instead of earlier ones, until `listen_no_more`.

    Listeners form a stack, because a callback of one `fit` may call another `fit`. A listener that
    is garbage-collected is removed.
    """
    global _listeners
    _listeners = (*_without(listener), weakref.ref(listener))


def listen_no_more(listener: Listener) -> None:
    """Removes `listener`; the one before it receives reports again."""
    global _listeners
    _listeners = _without(listener)


def _without(listener: Listener) -> tuple[weakref.ref[Listener], ...]:
    return tuple(each for each in _listeners if each() not in (None, listener))


def listeners() -> list[Listener]:
    """Returns the live listeners; the last one receives reports."""
    return [listener for each in _listeners if (listener := each()) is not None]


def report(event: Event) -> None:
    """Sends `event` to the current listener, if any."""
    for listener in listeners()[-1:]:
        listener.on_event(event)


@contextmanager
def time_spent(category: Category) -> Iterator[None]:
    """Reports the duration of its body. For the training thread only."""
    start_s = time.perf_counter()
    try:
        yield
    finally:
        secs = time.perf_counter() - start_s
        for listener in listeners()[-1:]:
            listener.spent(category, secs)
