"""Where a worker's time goes."""

from __future__ import annotations

import enum
from collections import defaultdict


class Category(enum.StrEnum):
    """What a second was spent on. Each belongs to one of them."""

    STEP = "step"  # productive: computing updates, for the first time
    INPUT = "input"  # waiting for data
    SYNC = "sync"  # waiting for other replicas, and for the sum of gradients
    SAVE = "save"  # training stands still for a checkpoint
    RESTORE = "restore"  # reading one
    START_UP = "start_up"  # of a process, up to its first step, which is traced, with that
    REDONE = "redone"  # trained already by an earlier attempt, left out, or rolled back
    RECOVERY = "recovery"  # from the last that is known of an attempt to the next one's start
    EVALUATION = "evaluation"  # validation
    OTHER = "other"  # callbacks, the ends of epochs, nobody training


class Ledger:
    """Puts down each moment to one category.

    Args:
        begun_s: When it begins, by the clock that all methods are given.
        category: Of what comes then.
    """

    def __init__(self, begun_s: float, category: Category) -> None:
        self._category = category
        self._since_s = begun_s
        self._secs: defaultdict[Category, float] = defaultdict(float)

    def switch(self, category: Category, now_s: float) -> None:
        """From `now_s` on, time goes to `category`."""
        self._secs[self._category] += now_s - self._since_s
        self._category, self._since_s = category, now_s

    def spent(self, category: Category, secs: float, now_s: float) -> None:
        """The last `secs` went to `category`, and not to where they were put."""
        self.switch(self._category, now_s)
        self._secs[self._category] -= secs
        self._secs[category] += secs

    def take(self, now_s: float) -> dict[Category, float]:
        """All since it began, or since the last time."""
        self.switch(self._category, now_s)
        taken, self._secs = dict(self._secs), defaultdict(float)
        return taken


def split(
    secs: dict[Category, float], whole: Category, parts: dict[Category, float]
) -> dict[Category, float]:
    """Moves what is known to be `parts` of `whole`, as far as there is so much."""
    found = dict(secs)
    for category, part_s in parts.items():
        moved_s = min(max(part_s, 0.0), max(found.get(whole, 0.0), 0.0))
        found[whole] = found.get(whole, 0.0) - moved_s
        found[category] = found.get(category, 0.0) + moved_s
    return found
