"""How often a checkpoint is made. Time comes in as an argument; nothing here looks at a clock.

A cadence that goes by time is one worker's to judge, and all workers have to save at the same step.
So the first one says at some step at which later step the workers shall look again, and at that
step whether a save is due: one message a look, and none in the steps between.
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

_STEPS, _SAVES = 50, 3  # of which the median is taken
_STEPS_BEFORE_FIRST, _SECS_BEFORE_FIRST = 10, 40.0
_SECS_BETWEEN_REMOTE = 20.0
_CAUTION = 0.8
_DURATION = re.compile(r"(\d+(?:\.\d+)?) *(s|sec|min|h)")
_SECONDS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class EveryEpoch:
    """At the end of each epoch."""


@dataclass(frozen=True)
class AtEnd:
    """At the end of training only."""


@dataclass(frozen=True)
class EveryBatches:
    """Each `batches` batches."""

    batches: int


@dataclass(frozen=True)
class EverySeconds:
    """Each `seconds` seconds."""

    seconds: float


@dataclass(frozen=True)
class Auto:
    """As often as the share of the time that saves cost stays below `max_overhead`.

    Args:
        max_overhead: Above 0, below 1.
        least_secs: Between saves. A request to a store costs money.
    """

    max_overhead: float
    least_secs: float = 2.0


Cadence = EveryEpoch | AtEnd | EveryBatches | EverySeconds | Auto


def cadence_of(
    save_freq: SaveFreq, max_overhead: float, name: str = "save_freq", *, is_near: bool = True
) -> Cadence:
    """What a user's `save_freq` means.

    Args:
        save_freq: As the user gave it.
        max_overhead: For `"auto"`.
        name: Of the argument, for errors.
        is_near: Whether a save goes to a disk, not to a store.

    Raises:
        ConfigurationError: If it means nothing.
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
    """What the first worker says at a look.

    Args:
        save: Whether a checkpoint is made at this step.
        next_look: The step at whose end the workers ask again; None if that is up to the epochs.
    """

    save: bool
    next_look: int | None


class Pace:
    """Judges when a checkpoint is due. The first worker's speaks for all.

    `"auto"` follows CheckFreq (Mohan et al., FAST 2021): what a save costs is measured, as the time
    for which it keeps training plus what the steps take longer while it is written, and the
    interval is that cost over `max_overhead`. Young's and Daly's optimum, `sqrt(2 * cost * M)`,
    needs the mean time between failures `M`, which nobody knows beforehand; it is the same interval
    for `M = cost / (2 * max_overhead ** 2)`, and less is lost at more frequent failures.

    Args:
        cadence: What the user asked for.
        step: The step behind which training starts.
        now_s: The time.
        wait_if_busy: Whether a save that is due waits for one that is under way, or is skipped.
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

    def first_look(self) -> int | None:
        """The first step at whose end the workers ask; None if that is up to the epochs."""
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
        """The time between saves; None if it does not go by time, or is not known yet."""
        match self._cadence:
            case EverySeconds(seconds):
                return seconds
            case Auto(max_overhead, least_secs) if self._costs_s:
                by_cost_s = statistics.median(self._costs_s) / max_overhead
                return max(by_cost_s, self._duration_s, least_secs)
        return None

    @property
    def cost_s(self) -> float | None:
        """What a save costs training; None before the first one has ended."""
        return statistics.median(self._costs_s) if self._costs_s else None

    @property
    def duration_s(self) -> float:
        """How long the last save took; 0 before the first one has ended."""
        return self._duration_s

    def stepped(self, seconds: float, *, is_saving: bool) -> None:
        """A step took `seconds`, while a save was or was not under way."""
        if not is_saving:
            self._quiet_s.append(seconds)
        elif self._quiet_s:
            self._excess_s += seconds - statistics.median(self._quiet_s)

    def saved(self, stall_s: float, duration_s: float) -> None:
        """A save has ended that kept training for `stall_s`, and took `duration_s` in all."""
        self._costs_s.append(stall_s + max(self._excess_s, 0.0))
        self._duration_s = duration_s
        self._excess_s = 0.0

    def at_epoch_end(self, step: int, now_s: float, *, is_saving: bool, is_last: bool) -> Plan:
        """What to do at the end of an epoch. The last one's is saved whatever is under way."""
        if is_last and not isinstance(self._cadence, AtEnd):
            return self._due(step, now_s, is_saving=False)
        is_first = isinstance(self._cadence, Auto) and self.interval_s is None and not is_saving
        if is_first or isinstance(self._cadence, EveryEpoch):
            return self._due(step, now_s, is_saving=is_saving)
        return Plan(save=False, next_look=None)

    def at_look(self, step: int, now_s: float, *, is_saving: bool) -> Plan:
        """What to do at the end of a step at which the workers ask."""
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
        """A little fewer steps than fit into `seconds`: the next look corrects the estimate."""
        step_s = statistics.median(self._quiet_s) if self._quiet_s else 0.0
        return max(1, int(_CAUTION * seconds / step_s)) if step_s else 1
