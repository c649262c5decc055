"""Polls for notices during training."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

from keras_distplug.core.errors import MetadataError
from keras_distplug.core.log import announce
from keras_distplug.preemption.notices.notice import Notice, Poll


class Watcher:
    """Polls in its own thread, and reports notices.

    Reports the first notice, and if that is not final, also the first final one; then it stops. It
    keeps polling a server that gives no valid answer, and logs this once, and again when the
    server has recovered.

    Example:

        cloud = detect()
        if cloud is not None:
            watcher = Watcher(poller(cloud), lambda notice: print(notice.announced))

    Args:
        poll: Function that polls once.
        report: Function called with a notice, in the watcher's thread.
        every_secs: Pause between two polls, in seconds. Defaults to 5, as AWS recommends.
    """

    def __init__(
        self, poll: Poll, report: Callable[[Notice], object], every_secs: float = 5.0
    ) -> None:
        self._poll = poll
        self._report = report
        self._every_secs = every_secs
        self._troubles: set[type[Exception]] = set()  # already logged
        self._is_closed = threading.Event()
        # A daemon thread, because a pending request must not delay the exit of the process.
        self._thread = threading.Thread(
            target=self._watch, name="keras_distplug-notices", daemon=True
        )
        # Failures caused by the exit of the process are not worth logging.
        atexit.register(self.close)
        self._thread.start()

    def close(self) -> None:
        """Stops polling, without waiting.

        The result of a pending request is discarded. A running `report` continues.
        """
        self._is_closed.set()
        atexit.unregister(self.close)

    def _watch(self) -> None:
        has_reported = False
        while True:
            notice = self._ask()
            if self._is_closed.is_set():
                return
            if notice is not None and (notice.is_final or not has_reported):
                has_reported = True
                try:
                    self._report(notice)
                except Exception as error:  # noqa: BLE001 (no caller in this thread)
                    announce(
                        f"{notice.source} notice of {notice.announced}: handling it failed, so "
                        f"training continues without saving a checkpoint for it: {error!r}"
                    )
                if notice.is_final:
                    return
            if self._is_closed.wait(self._every_secs):
                return

    def _ask(self) -> Notice | None:
        try:
            notice = self._poll()
        except Exception as error:  # noqa: BLE001 (logged, and polled again)
            if not self._is_closed.is_set() and type(error) not in self._troubles:
                self._troubles.add(type(error))
                what = (
                    str(error)
                    if isinstance(error, MetadataError)
                    else f"an unexpected error: {error!r}"
                )
                announce(
                    "preemption notices cannot be read; retrying every "
                    f"{self._every_secs:g} s: {what}"
                )
            return None
        if self._troubles and not self._is_closed.is_set():
            self._troubles.clear()
            announce("preemption notices can be read again")
        return notice
