"""Who reports events, and who hears of them, in this process.

As with `logging`, those who report do not know who listens: a callback may be given with others or
alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from keras_distplug.core.events import Event
from keras_distplug.core.ledger import Category


class Listener(Protocol):
    """Hears what happens. Neither method may raise, or wait for a storage."""

    def hear(self, event: Event) -> None:
        """From any thread."""
        ...

    def spent(self, category: Category, secs: float) -> None:
        """So much of the time until now went to that. From the thread that trains."""
        ...


_listeners: tuple[Listener, ...] = ()


def listen(listener: Listener) -> Callable[[], None]:
    """Tells `listener` of all that is reported, until what this gives is called."""
    global _listeners
    _listeners = (*_listeners, listener)

    def listen_no_more() -> None:
        global _listeners
        _listeners = tuple(each for each in _listeners if each is not listener)

    return listen_no_more


def report(event: Event) -> None:
    for listener in _listeners:
        listener.hear(event)


@contextmanager
def time_spent(category: Category) -> Iterator[None]:
    """Reports what its body takes. In the thread that trains."""
    begun_s = time.perf_counter()
    try:
        yield
    finally:
        secs = time.perf_counter() - begun_s
        for listener in _listeners:
            listener.spent(category, secs)
