"""Progress of a long operation, for messages of whatever waits for it."""

from __future__ import annotations

import threading


class Meter:
    """Counts the bytes that an operation has processed, from any thread.

    Args:
        total: The expected number of bytes. Defaults to 0: not known yet.
    """

    def __init__(self, total: int = 0) -> None:
        self.total = total
        self._done = 0
        self._lock = threading.Lock()

    @property
    def done(self) -> int:
        """The number of bytes processed, at most `total` even if some were retried."""
        return min(self._done, self.total)

    def begin(self, total: int) -> None:
        """Restarts the count at 0."""
        with self._lock:
            self.total, self._done = total, 0

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count

    def __str__(self) -> str:
        """Formats the progress for messages: `"312 of 1,024 MB"`."""
        if not self.total:
            return "0 MB"
        return f"{self.done / 2**20:,.0f} of {self.total / 2**20:,.0f} MB"
