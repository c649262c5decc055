"""Receives TensorFlow's own notice of a preemption.

It also covers a SIGTERM before `fit`, and workers whose signals are not watched. The coordination
service keeps every unanswered request, so only one worker sends one, and only once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from keras_distplug.backend.tensorflow.runtime.preemption_notice import NOTICE_KEY, task_name
from keras_distplug.cluster.channel import KeyValues
from keras_distplug.cluster.listeners import close_at_exit, run_in_background

_CLOSED = "keras_distplug: closed"
_CLOSING_S = 5.0


class TfPreemptionNotice:
    """Waits for the notice in a thread until it is closed. The next instance gets later notices.

    Args:
        store: Key-value store of the coordination service.
        report: Function called, from the thread, with the name of the preempted worker.
    """

    def __init__(self, store: KeyValues, report: Callable[[str], object]) -> None:
        self._store = store
        self._report = report
        self._closed = threading.Event()
        self._thread = run_in_background(self._listen)
        close_at_exit(self)

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            run_in_background(self._end_listening).join(_CLOSING_S)

    def _listen(self) -> None:
        # The connection is lost only with a worker, which ends `fit` with its own error.
        with contextlib.suppress(ConnectionError):
            notice = self._store.get(NOTICE_KEY, None)
            if notice != _CLOSED and not self._closed.is_set():
                self._report(task_name(notice))
                self._store.delete(NOTICE_KEY)

    def _end_listening(self) -> None:
        with contextlib.suppress(ConnectionError):
            if self._thread.is_alive() and self._store.put_first(NOTICE_KEY, _CLOSED):
                self._thread.join(_CLOSING_S)
                self._store.delete(NOTICE_KEY)
