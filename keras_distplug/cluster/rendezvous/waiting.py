"""Limits how long a worker waits, and reports the missing workers."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from keras_distplug.cluster.roles import Role
from keras_distplug.core.errors import ConfigurationError, PeerLostError
from keras_distplug.core.log import announce

LIMIT = "KERAS_DISTPLUG_JOIN_TIMEOUT"

_LIMIT_SECS = 3600.0  # TensorFlow's own
_FIRST_LINE_SECS = 3.0
# For workers that have not started when one has failed. Slurm does not end the rest of a step.
_FAREWELL_SECS, _FAREWELL_OF_SLURM_SECS = 5.0, 60.0
_LINE_EVERY_SECS = 60.0


@dataclass
class Waiting:
    """Reports which workers are missing, every minute, and limits the wait."""

    role: Role
    limit_secs: float
    _since: float = field(default_factory=time.monotonic)
    _next: float = field(default_factory=lambda: _FIRST_LINE_SECS)

    def on(self, whom: str, why: str) -> None:
        """Reports once a minute. Call it repeatedly.

        Raises:
            PeerLostError: Once the limit is over.
        """
        secs = time.monotonic() - self._since
        if secs > self.limit_secs:
            raise PeerLostError(
                f"{self.role.name} has waited {secs:.0f} s for {whom} to join ({why}). "
                f"Expected all tasks to join within the limit ({LIMIT}). Start those that are "
                "missing, raise the limit, or correct the addresses (from "
                f"{self.role.source})."
            )
        if secs > self._next:
            self._next = secs + _LINE_EVERY_SECS
            announce(f"{self.role.name} is waiting for {whom} to join ({why})")


def limit_secs() -> float:
    given = os.environ.get(LIMIT)
    try:
        limit_secs = _LIMIT_SECS if given is None else float(given)
    except ValueError:
        limit_secs = 0.0
    if not limit_secs > 0:
        raise ConfigurationError(
            f"Expected {LIMIT} to be a number of seconds, above 0: how long a worker waits for "
            f"the others to start. Received: {given!r}"
        )
    return limit_secs


def farewell_secs(role: Role) -> float:
    """Returns how long a failed process waits for other workers to report its error."""
    return _FAREWELL_OF_SLURM_SECS if role.source == "Slurm" else _FAREWELL_SECS
