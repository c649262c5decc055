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
import sys
import threading
import time
from typing import Any

_LOOK_S = 0.02
_HELD_S = 10.0  # by somebody else, who may keep it for ever


def end_beside(iterator: Any) -> None:
    """Drops an iterator in a thread, once nobody else has it. Never waits."""
    _thread()
    _dropped.put(iterator)


_dropped: queue.Queue[Any] = queue.Queue()


@functools.cache
def _thread() -> threading.Thread:
    # What has not ended when the interpreter does would end together with what it uses.
    getattr(threading, "_register_atexit", atexit.register)(_dropped.join)
    thread = threading.Thread(target=_drop, name="keras_distplug-iterators", daemon=True)
    thread.start()
    return thread


def _drop() -> None:
    while True:
        iterator = _dropped.get()
        end_s = time.monotonic() + _HELD_S
        while sys.getrefcount(iterator) > 2 and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        del iterator
        _dropped.task_done()
