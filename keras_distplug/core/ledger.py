"""Accounts for a worker's time by category."""

from __future__ import annotations

import enum
from collections import defaultdict


class Category(enum.StrEnum):
    """A use of time. Every second belongs to exactly one category."""

    STEP = "step"  # productive: computing updates for the first time
    INPUT = "input"  # waiting for data
    SYNC = "sync"  # waiting for other replicas and for the sum of gradients
    SAVE = "save"  # training stopped for a checkpoint
    RESTORE = "restore"  # reading a checkpoint
    START_UP = "start_up"  # a process up to and including its first step, with tracing
    REDONE = "redone"  # steps repeated after a restart, skipped, or rolled back
    RECOVERY = "recovery"  # from the last sign of an attempt to the start of the next
    EVALUATION = "evaluation"  # validation
    OTHER = "other"  # callbacks, epoch ends, and time without any training


class Ledger:
    """Assigns elapsed time to categories.

    Args:
        begun_s: Start time in seconds, by the clock used for all calls.
        category: The initial category.
    """

    def __init__(self, begun_s: float, category: Category) -> None:
        self._category = category
        self._since_s = begun_s
        self._secs: defaultdict[Category, float] = defaultdict(float)

    def switch(self, category: Category, now_s: float) -> None:
        """Counts time from `now_s` as `category`."""
        self._secs[self._category] += now_s - self._since_s
        self._category, self._since_s = category, now_s

    def spent(self, category: Category, secs: float, now_s: float) -> None:
        """Moves the last `secs` from the current category to `category`."""
        self.switch(self._category, now_s)
        self._secs[self._category] -= secs
        self._secs[category] += secs

    def take(self, now_s: float) -> dict[Category, float]:
        """Returns the seconds per category since the start or the last call."""
        self.switch(self._category, now_s)
        taken, self._secs = dict(self._secs), defaultdict(float)
        return taken


def split(
    secs: dict[Category, float], whole: Category, parts: dict[Category, float]
) -> dict[Category, float]:
    """Moves `parts` out of the category `whole`, at most as much as it holds."""
    found = dict(secs)
    for category, part_s in parts.items():
        moved_s = min(max(part_s, 0.0), max(found.get(whole, 0.0), 0.0))
        found[whole] = found.get(whole, 0.0) - moved_s
        found[category] = found.get(category, 0.0) + moved_s
    return found
