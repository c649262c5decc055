"""Destroys iterators in the background, because TensorFlow may need a minute for it.

TensorFlow 2.18 to 2.21: a thread that tunes the pipeline is notified of the cancellation before it
can see it (`CancellationManager::StartCancel` calls back before it sets `IsCancelled`). If the
thread checks in between, it sleeps until the next tuning, and the code that dropped the iterator
waits for it: `fit`, between two epochs. One of eight iterators that were dropped two seconds after
their creation took half a second; the interval between tunings grows to up to a minute.
"""

from __future__ import annotations

import atexit
import functools
import queue
import threading
import time
import weakref
from typing import Any

_NAME = "keras_distplug-iterators"
_ENDING_S = 90.0  # more than the minute that TensorFlow may need


def end_beside(iterator: Any) -> None:
    """Destroys the parts of `iterator` in a thread, once `iterator` itself has been released.

    The code that drops the iterator never waits. The process waits at its exit, for a limited time.
    """
    _thread()
    weakref.finalize(iterator, _hand_over, list(vars(iterator).values()))


_parts: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()


@functools.cache
def _thread() -> threading.Thread:
    thread = threading.Thread(target=_end, name=_NAME, daemon=True)
    thread.start()

    def end_all() -> None:
        _parts.put(None)
        thread.join()

    atexit.register(end_all)
    return thread


def _hand_over(parts: list[Any]) -> None:
    # The list itself is handed over, because releasing the last reference to a part takes time.
    # The garbage collector may call this at any point, so nothing here may take a lock.
    if _thread().is_alive():
        _parts.put(parts)
    else:  # the process is exiting, or is a fork
        parts.clear()


def _end() -> None:
    ending: list[threading.Thread] = []
    while (parts := _parts.get()) is not None:
        # One thread per iterator, so that a slow one does not delay others.
        thread = threading.Thread(target=parts.clear, name=_NAME, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the process is exiting
            parts.clear()
        ending = [each for each in (*ending, thread) if each.is_alive()]
    # If it takes longer than this, the data hangs and the thread never ends.
    until_s = time.monotonic() + _ENDING_S
    for thread in ending:
        thread.join(max(0.0, until_s - time.monotonic()))
