"""The interval between checkpoints. Time is passed as an argument; nothing here reads a clock.

A time-based cadence depends on one worker's clock, but all workers must save at the same step. So
the first worker announces at which later step the workers check again, and at that step whether a
save is due: one message per check, and none in the steps between.
"""

from __future__ import annotations

import datetime
import re
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Literal

from keras_distplug.core.errors import ConfigurationError

SaveFreq = Literal["epoch", "auto", False] | int | str | datetime.timedelta

_STEPS, _SAVES = 50, 3  # window sizes of the medians
_STEPS_BEFORE_FIRST, _SECS_BEFORE_FIRST = 10, 40.0
_SECS_BETWEEN_REMOTE = 20.0
_CAUTION = 0.8
_DURATION = re.compile(r"(\d+(?:\.\d+)?) *(s|sec|min|h)")
_SECONDS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class EveryEpoch:
    """Saves at the end of every epoch."""


@dataclass(frozen=True)
class AtEnd:
    """Saves at the end of training only."""


@dataclass(frozen=True)
class EveryBatches:
    """Saves every `batches` batches."""

    batches: int


@dataclass(frozen=True)
class EverySeconds:
    """Saves every `seconds` seconds."""

    seconds: float


@dataclass(frozen=True)
class Auto:
    """Saves as often as possible while the fraction of time spent on saves is below `max_overhead`.

    Args:
        max_overhead: Largest fraction of the time, between 0 and 1.
        least_secs: Least time between saves, in seconds. A request to a store costs money.
    """

    max_overhead: float
    least_secs: float = 2.0


Cadence = EveryEpoch | AtEnd | EveryBatches | EverySeconds | Auto


def get_cadence(
    save_freq: SaveFreq, max_overhead: float, name: str = "save_freq", *, is_near: bool = True
) -> Cadence:
    """Returns the cadence for a user's `save_freq`.

    Args:
        save_freq: The user's value.
        max_overhead: Largest fraction of the time spent on saves, for `"auto"`.
        name: The argument's name, for errors.
        is_near: True if saves go to a disk, not to a store.

    Raises:
        ConfigurationError: If the value is not accepted.
    """
    match save_freq:
        case False:
            return AtEnd()
        case "epoch":
            return EveryEpoch()
        case "auto":
            return Auto(max_overhead) if is_near else Auto(max_overhead, _SECS_BETWEEN_REMOTE)
        case int() if save_freq is not True and save_freq > 0:
            return EveryBatches(save_freq)
        case datetime.timedelta() if save_freq.total_seconds() > 0:
            return EverySeconds(save_freq.total_seconds())
        case str() if match := _DURATION.fullmatch(save_freq):
            if (seconds := float(match[1]) * _SECONDS[match[2]]) > 0:
                return EverySeconds(seconds)
    raise ConfigurationError(
        f'Expected `{name}` to be "epoch", "auto", False, a number of batches >= 1, a '
        'datetime.timedelta, or a time such as "30s", "5min" or "1.5h". Received: '
        f"{name}={save_freq!r}"
    )


@dataclass(frozen=True)
class Plan:
    """The first worker's decision at a check.

    Args:
        save: True if a checkpoint is made at this step.
        next_look: The step after which the workers check again; None if only epoch ends matter.
    """

    save: bool
    next_look: int | None


class Pace:
    """Decides when a checkpoint is due. The first worker's pace decides for all workers.

    `"auto"` follows CheckFreq (Mohan et al., FAST 2021): the cost of a save is measured, as the
    time for which it blocks training plus the extra time that steps take while it is written, and
    the interval is that cost over `max_overhead`. Young's and Daly's optimum,
    `sqrt(2 * cost * M)`, needs the mean time between failures `M`, which is not known beforehand;
    it is the same interval for `M = cost / (2 * max_overhead ** 2)`, and with more frequent
    failures, less is lost.

    Args:
        cadence: The cadence that the user asked for.
        step: The step after which training starts.
        now_s: The current time, in seconds.
        wait_if_busy: True if a save that is due waits for one in progress; otherwise it is skipped.
    """

    def __init__(self, cadence: Cadence, step: int, now_s: float, *, wait_if_busy: bool) -> None:
        self._cadence = cadence
        self._wait_if_busy = wait_if_busy
        self._last_step, self._last_s = step, now_s
        self._quiet_s: deque[float] = deque(maxlen=_STEPS)
        self._excess_s = 0.0
        self._costs_s: deque[float] = deque(maxlen=_SAVES)
        self._duration_s = 0.0
        self.skipped = 0

    def first_check_step(self) -> int | None:
        """Returns the first step after which the workers check; None if only epoch ends matter."""
        match self._cadence:
            case EveryBatches(batches):
                return self._last_step + batches
            case EverySeconds() | Auto():
                return self._last_step + 1
        return None

    @property
    def is_automatic(self) -> bool:
        return isinstance(self._cadence, Auto)

    @property
    def interval_s(self) -> float | None:
        """The time between saves, in seconds; None if not time-based, or not known yet."""
        match self._cadence:
            case EverySeconds(seconds):
                return seconds
            case Auto(max_overhead, least_secs) if self._costs_s:
                by_cost_s = statistics.median(self._costs_s) / max_overhead
                return max(by_cost_s, self._duration_s, least_secs)
        return None

    @property
    def cost_s(self) -> float | None:
        """The cost of a save in seconds of training; None before the first one has finished."""
        return statistics.median(self._costs_s) if self._costs_s else None

    @property
    def duration_s(self) -> float:
        """The duration of the last save in seconds; 0 before the first one has finished."""
        return self._duration_s

    def stepped(self, seconds: float, *, is_saving: bool) -> None:
        """Records that a step took `seconds`, while a save was or was not in progress."""
        if not is_saving:
            self._quiet_s.append(seconds)
        elif self._quiet_s:
            self._excess_s += seconds - statistics.median(self._quiet_s)

    def saved(self, stall_s: float, duration_s: float) -> None:
        """Records a finished save that blocked training for `stall_s`; it took `duration_s`."""
        self._costs_s.append(stall_s + max(self._excess_s, 0.0))
        self._duration_s = duration_s
        self._excess_s = 0.0

    def plan_at_epoch_end(
        self,
        step: int,
        now_s: float,
        *,
        is_saving: bool,
        is_last: bool = False,
        is_best: bool = False,
    ) -> Plan:
        """Returns the plan at an epoch's end.

        `"auto"` does not save because an epoch is the last: the end of training saves, too, and no
        more than an interval can be lost until then. It saves at an epoch's end if nothing was
        saved before.

        Args:
            step: Number of steps since the run started.
            now_s: The current time, in seconds.
            is_saving: True if a save is in progress. The last epoch and the best ones wait for it.
            is_last: True if no epoch follows.
            is_best: True if the epoch is among the best ones, which the user wants to keep.
        """
        match self._cadence:
            case AtEnd():
                save = False
            case EveryEpoch():
                save = True
            case Auto():
                save = self.interval_s is None and not is_saving
            case _:
                save = is_last
        if save or is_best:
            return self._due(step, now_s, is_saving=is_saving and not (is_last or is_best))
        return Plan(save=False, next_look=None)

    def plan_at_check(self, step: int, now_s: float, *, is_saving: bool) -> Plan:
        """Returns the plan at the end of a step after which the workers check."""
        match self._cadence:
            case EveryBatches():
                return self._due(step, now_s, is_saving=is_saving)
            case Auto() if self.interval_s is None and is_saving:
                return Plan(save=False, next_look=step + 1)
            case Auto() if self.interval_s is None and len(self._quiet_s) < _STEPS_BEFORE_FIRST:
                left_s = self._last_s + _SECS_BEFORE_FIRST - now_s
                if left_s > 0:
                    steps = min(_STEPS_BEFORE_FIRST, self._steps_in(left_s))
                    return Plan(save=False, next_look=step + steps)
        remaining_s = self._last_s + (self.interval_s or 0.0) - now_s
        if remaining_s <= 0:
            return self._due(step, now_s, is_saving=is_saving)
        return Plan(save=False, next_look=step + self._steps_in(remaining_s))

    def _due(self, step: int, now_s: float, *, is_saving: bool) -> Plan:
        skips = is_saving and not self._wait_if_busy
        self.skipped += skips
        self._last_step, self._last_s = step, now_s
        if isinstance(self._cadence, EveryBatches):
            next_look: int | None = step + self._cadence.batches
        elif isinstance(self._cadence, EverySeconds | Auto):
            next_look = step + self._steps_in(self.interval_s or 0.0)
        else:
            next_look = None
        return Plan(save=not skips, next_look=next_look)

    def _steps_in(self, seconds: float) -> int:
        """Returns slightly fewer steps than fit into `seconds`: the next check corrects that."""
        step_s = statistics.median(self._quiet_s) if self._quiet_s else 0.0
        return max(1, int(_CAUTION * seconds / step_s)) if step_s else 1
