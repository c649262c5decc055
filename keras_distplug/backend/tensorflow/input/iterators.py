"""The end of an iterator, which may take TensorFlow a minute.

TensorFlow 2.18 to 2.21: a thread that tunes the pipeline is told of the end before it can see that
it has come (`CancellationManager::StartCancel` calls back first and sets `IsCancelled` then). Where
it looks up in between it goes to sleep again, until it would tune next, and whoever has dropped the
iterator waits for it: of `fit`, between two epochs. Of eight iterators, dropped two seconds after
they were made, it was one that took half a second; the tuning comes less and less often, down to
once a minute.
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
_ENDING_S = 90.0  # more than the minute that TensorFlow may take


def end_beside(iterator: Any) -> None:
    """Has a thread end what `iterator` is made of, once `iterator` itself is gone.

    Whoever drops it never waits. The end of the process does, for as long as that makes sense.
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
    # The list goes along, for whoever lets go of what is in it last is the one who waits. The
    # garbage collector may come here from anywhere: nothing may be asked that has a lock.
    if _thread().is_alive():
        _parts.put(parts)
    else:  # the process ends, or is a fork
        parts.clear()


def _end() -> None:
    ending: list[threading.Thread] = []
    while (parts := _parts.get()) is not None:
        # One that takes its minute keeps no other one.
        thread = threading.Thread(target=parts.clear, name=_NAME, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the process has begun to end
            parts.clear()
        ending = [each for each in (*ending, thread) if each.is_alive()]
    # What comes later has no end: data that hang.
    until_s = time.monotonic() + _ENDING_S
    for thread in ending:
        thread.join(max(0.0, until_s - time.monotonic()))
