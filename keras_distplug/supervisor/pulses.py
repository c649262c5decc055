"""Detects workers that give no sign of life because they are stopped or cannot run Python."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from keras_distplug.core.supervised import Supervised

_CHECKS = 10  # checks within the limit
_MAX_INTERVAL_SECS = 5.0


@dataclass
class _LastBeat:
    beat: int | None
    silent_secs: float


class Pulses:
    """Watches the signs of life of an attempt's workers.

    A worker does not count as silent before its first sign of life, if its process is gone, or in a
    debugger. Time during which the supervisor itself was stopped does not count either.

    Args:
        contract: Contract that gives access to the signs of life.
        workers: Names of the workers.
        limit_secs: Seconds without a sign of life after which a worker is silent.
        clock: Clock in seconds. Defaults to `time.monotonic`.
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
        self._last_beats = {worker: _LastBeat(None, 0.0) for worker in workers}
        self._checked_at = clock()

    @property
    def look_every_secs(self) -> float:
        return min(self._limit_secs / _CHECKS, _MAX_INTERVAL_SECS)

    def look(self) -> dict[str, str]:
        """Returns the silent workers with their process states, such as "S (sleeping)".

        Must be called at least every `look_every_secs`.
        """
        now = self._clock()
        passed_secs = min(now - self._checked_at, 2 * self.look_every_secs)
        self._checked_at = now
        silent = {}
        for worker, last in self._last_beats.items():
            pulse = self._contract.pulse_file(worker)
            try:
                beat, pid = pulse.stat().st_mtime_ns, int(pulse.read_text())
            except (OSError, ValueError):
                continue
            state = _read_state(pid)
            if beat != last.beat or state is None:
                last.beat, last.silent_secs = beat, 0.0
                continue
            last.silent_secs += passed_secs
            if last.silent_secs >= self._limit_secs:
                silent[worker] = state
        return silent


def _read_state(pid: int) -> str | None:
    """Returns the state of a process, or None if it is gone or in a debugger."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    found = dict(re.findall(r"^(State|TracerPid):\s*(.*)$", status, re.MULTILINE))
    state: str = found.get("State", "Z")
    is_debugged = found.get("TracerPid", "0") != "0"
    return None if state.startswith(("Z", "X")) or is_debugged else state
