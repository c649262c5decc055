"""How far something is that takes long, for those who wait."""

from __future__ import annotations

import threading


class Meter:
    """Counts the bytes of what is under way, from any thread.

    Args:
        total: How many there are. Defaults to 0, for not known yet.
    """

    def __init__(self, total: int = 0) -> None:
        self.total = total
        self._done = 0
        self._lock = threading.Lock()

    @property
    def done(self) -> int:
        """How many are through. What was tried twice counts once."""
        return min(self._done, self.total)

    def begin(self, total: int) -> None:
        """Counts from 0 again."""
        with self._lock:
            self.total, self._done = total, 0

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count

    def __str__(self) -> str:
        """For people: `"312 of 1,024 MB"`."""
        if not self.total:
            return "0 MB"
        return f"{self.done / 2**20:,.0f} of {self.total / 2**20:,.0f} MB"
