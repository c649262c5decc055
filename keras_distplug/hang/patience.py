"""How long a part of training may take before it counts as hung."""

from __future__ import annotations

import enum
from collections.abc import Mapping

_TIMES_THE_LONGEST = 5


class Stage(enum.StrEnum):
    """Which part of training it is."""

    FIRST_STEP = "first step"  # with all that comes before it: taking up, tracing
    STEP = "step"
    FIRST_VALIDATION_STEP = "first validation step"
    VALIDATION_STEP = "validation step"
    BETWEEN = "between steps"  # callbacks, saves


# What took long before may take longer still; what took no time at all may some day.
_FLOORS_S = {
    Stage.FIRST_STEP: 3600.0,
    Stage.STEP: 300.0,
    Stage.FIRST_VALIDATION_STEP: 3600.0,
    Stage.VALIDATION_STEP: 300.0,
    Stage.BETWEEN: 3600.0,
}
# A later step may be traced again, as the first one was.
_LIKE = {Stage.FIRST_STEP: Stage.STEP, Stage.FIRST_VALIDATION_STEP: Stage.VALIDATION_STEP}


class Patience:
    """Learns from how long each stage has taken.

    Args:
        limits_s: Of the stages whose limit is given. Any other one is five times the longest of its
            kind so far, and not less than a floor: five minutes for a step, an hour for a first one
            and for what comes between steps.
    """

    def __init__(self, limits_s: Mapping[Stage, float]) -> None:
        self._given_s = dict(limits_s)
        self._longest_s = dict.fromkeys(Stage, 0.0)
        self._limits_s = {**_FLOORS_S, **limits_s}

    def took(self, stage: Stage, seconds: float) -> None:
        if seconds <= self._longest_s[stage]:
            return
        for each in {stage, _LIKE.get(stage, stage)}:
            self._longest_s[each] = longest_s = max(self._longest_s[each], seconds)
            if each not in self._given_s:
                self._limits_s[each] = max(_FLOORS_S[each], _TIMES_THE_LONGEST * longest_s)

    def limit_s(self, stage: Stage) -> float:
        return self._limits_s[stage]
