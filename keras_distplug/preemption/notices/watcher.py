"""Asks for notices again and again, beside training."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

from keras_distplug.core.errors import MetadataError
from keras_distplug.core.log import announce
from keras_distplug.preemption.notices.notice import Notice, Poll


class Watcher:
    """Polls in a thread of its own, and tells what is announced.

    It tells the first notice, and, if that is not final, the first final one. Then it ends. A
    server that does not answer properly is asked on; the log says so once, and once more when it
    answers again.

    Example:

        cloud = detect()
        if cloud is not None:
            watcher = Watcher(poller(cloud), lambda notice: print(notice.announced))

    Args:
        poll: Asks once.
        tell: Called with a notice, in the thread of the watcher.
        every_secs: Seconds between the end of one question and the next. Defaults to 5, which is
            what AWS advises.
    """

    def __init__(
        self, poll: Poll, tell: Callable[[Notice], object], every_secs: float = 5.0
    ) -> None:
        self._poll = poll
        self._tell = tell
        self._every_secs = every_secs
        self._troubles: set[type[Exception]] = set()  # those that the log knows of
        self._is_closed = threading.Event()
        # A daemon, since a question that is under way must not keep the process.
        self._thread = threading.Thread(
            target=self._watch, name="keras_distplug-notices", daemon=True
        )
        # What fails because the process ends is no news.
        atexit.register(self.close)
        self._thread.start()

    def close(self) -> None:
        """Ends the watch. Waits for nothing: a question that is under way goes on to its end, and
        what comes of it is dropped; a `tell` that is under way goes on, too."""
        self._is_closed.set()
        atexit.unregister(self.close)

    def _watch(self) -> None:
        has_told = False
        while True:
            notice = self._ask()
            if self._is_closed.is_set():
                return
            if notice is not None and (notice.is_final or not has_told):
                has_told = True
                try:
                    self._tell(notice)
                except Exception as error:  # noqa: BLE001 (nobody else is there to hear of it)
                    announce(f"{notice}: what was to be done about it failed: {error!r}")
                if notice.is_final:
                    return
            if self._is_closed.wait(self._every_secs):
                return

    def _ask(self) -> Notice | None:
        try:
            notice = self._poll()
        except Exception as error:  # noqa: BLE001 (said, and asked again)
            if not self._is_closed.is_set() and type(error) not in self._troubles:
                self._troubles.add(type(error))
                what = str(error) if isinstance(error, MetadataError) else f"a bug: {error!r}"
                announce(
                    "notices of preemption cannot be read, and are asked for again every "
                    f"{self._every_secs:g} s: {what}"
                )
            return None
        if self._troubles and not self._is_closed.is_set():
            self._troubles.clear()
            announce("notices of preemption can be read again")
        return notice
