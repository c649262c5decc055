"""Who reports events, and who hears of them, in this process.

As with `logging`, those who report do not know who listens: a callback may be given with others or
alone.
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
    """Hears what happens. Neither method may raise, or wait for a storage."""

    def hear(self, event: Event) -> None:
        """From any thread."""
        ...

    def spent(self, category: Category, secs: float) -> None:
        """So much of the time until now went to that. From the thread that trains."""
        ...


# By weak references: an error may end a `fit` whose listener nobody ends, and which must not keep a
# model in memory.
_listeners: tuple[weakref.ref[Listener], ...] = ()


def listen(listener: Listener) -> None:
    """Tells `listener`, and none that came before, of all that is reported, as long as it is there
    or until `listen_no_more`: a callback of one `fit` may call another `fit`."""
    global _listeners
    _listeners = (*_without(listener), weakref.ref(listener))


def listen_no_more(listener: Listener) -> None:
    global _listeners
    _listeners = _without(listener)


def _without(listener: Listener) -> tuple[weakref.ref[Listener], ...]:
    return tuple(each for each in _listeners if each() not in (None, listener))


def listeners() -> list[Listener]:
    """Those that are there, the one that hears last."""
    return [listener for each in _listeners if (listener := each()) is not None]


def report(event: Event) -> None:
    for listener in listeners()[-1:]:
        listener.hear(event)


@contextmanager
def time_spent(category: Category) -> Iterator[None]:
    """Reports what its body takes. In the thread that trains."""
    begun_s = time.perf_counter()
    try:
        yield
    finally:
        secs = time.perf_counter() - begun_s
        for listener in listeners()[-1:]:
            listener.spent(category, secs)
