"""Workers that give no sign of life: stopped, or kept from running Python."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from keras_distplug.core.supervised import Supervised

_STEPS = 10  # looks within a limit
_LONGEST_LOOK_SECS = 5.0


@dataclass
class _Seen:
    beat: int | None
    silent_secs: float


class Pulses:
    """Watches the signs of life of an attempt's workers.

    One that has given none yet, whose process is gone, or that stands in a debugger is not counted,
    and neither is the time in which the supervisor was stopped itself.

    Args:
        contract: Where they are.
        workers: Their names.
        limit_secs: How long a worker may give none.
        clock: In seconds.
    """

    def __init__(
        self,
        contract: Supervised,
        workers: Iterable[str],
        limit_secs: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._contract = contract
        self._limit_secs = limit_secs
        self._clock = clock
        self._seen = {worker: _Seen(None, 0.0) for worker in workers}
        self._looked = clock()

    @property
    def look_every_secs(self) -> float:
        return min(self._limit_secs / _STEPS, _LONGEST_LOOK_SECS)

    def look(self) -> dict[str, str]:
        """Who is silent, and what the kernel says of the process: "S (sleeping)". To be called
        every `look_every_secs`, or sooner."""
        now = self._clock()
        passed_secs = min(now - self._looked, 2 * self.look_every_secs)
        self._looked = now
        silent = {}
        for worker, seen in self._seen.items():
            pulse = self._contract.pulse_of(worker)
            try:
                beat, pid = pulse.stat().st_mtime_ns, int(pulse.read_text())
            except (OSError, ValueError):
                continue
            state = _state_of(pid)
            if beat != seen.beat or state is None:
                seen.beat, seen.silent_secs = beat, 0.0
                continue
            seen.silent_secs += passed_secs
            if seen.silent_secs >= self._limit_secs:
                silent[worker] = state
        return silent


def _state_of(pid: int) -> str | None:
    """None of a process that is gone, or that somebody debugs."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    found = dict(re.findall(r"^(State|TracerPid):\s*(.*)$", status, re.MULTILINE))
    state: str = found.get("State", "Z")
    is_debugged = found.get("TracerPid", "0") != "0"
    return None if state.startswith(("Z", "X")) or is_debugged else state
