"""Time limits after which a stage of training counts as hung."""

from __future__ import annotations

import enum
from collections.abc import Mapping

_TIMES_THE_LONGEST = 5


class Stage(enum.StrEnum):
    """The stages of training that have separate limits."""

    FIRST_STEP = "first step"  # including everything before it: restoring, tracing
    STEP = "step"
    FIRST_VALIDATION_STEP = "first validation step"
    VALIDATION_STEP = "validation step"
    BETWEEN = "between steps"  # callbacks, saves


# Minimum limits: a stage that was fast so far may still be slow for good reasons later.
_FLOORS_S = {
    Stage.FIRST_STEP: 3600.0,
    Stage.STEP: 300.0,
    Stage.FIRST_VALIDATION_STEP: 3600.0,
    Stage.VALIDATION_STEP: 300.0,
    Stage.BETWEEN: 3600.0,
}
# A later step may be traced again like the first one, so the first one's time counts for it.
_LIKE = {Stage.FIRST_STEP: Stage.STEP, Stage.FIRST_VALIDATION_STEP: Stage.VALIDATION_STEP}

# Shorter durations do not change any limit.
SHORT_S = min(_FLOORS_S.values()) / _TIMES_THE_LONGEST


class Patience:
    """Adapts the limits to the durations of stages so far.

    Args:
        limits_s: Fixed limits in seconds by stage. Other limits are five times the stage's longest
            duration so far, but at least five minutes for a step, and an hour for a first step and
            for the time between steps.

    Attributes:
        limits_s: The current limits in seconds.
    """

    def __init__(self, limits_s: Mapping[Stage, float]) -> None:
        self._given_s = dict(limits_s)
        self._longest_s = dict.fromkeys(Stage, 0.0)
        self.limits_s = {**_FLOORS_S, **limits_s}

    def record_duration(self, stage: Stage, seconds: float) -> None:
        if seconds <= self._longest_s[stage]:
            return
        for each in {stage, _LIKE.get(stage, stage)}:
            self._longest_s[each] = longest_s = max(self._longest_s[each], seconds)
            if each not in self._given_s:
                self.limits_s[each] = max(_FLOORS_S[each], _TIMES_THE_LONGEST * longest_s)
