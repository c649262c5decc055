"""After how long a worker that does not answer counts as lost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from keras_distplug.core.errors import ConfigurationError

HEARTBEAT = "KERAS_DISTPLUG_HEARTBEAT_TIMEOUT"
COLLECTIVE = "KERAS_DISTPLUG_COLLECTIVE_TIMEOUT"

_LEAST_S = 1.0  # what a busy machine may well take for a heartbeat


@dataclass(frozen=True)
class Timeouts:
    """Time-outs of TensorFlow's cluster, the same on all workers. None leaves one to TensorFlow.

    Args:
        heartbeat_secs: How long a worker may send no heartbeat.
        collective_secs: How long workers may wait for each other within a step.
    """

    heartbeat_secs: float | None = None
    collective_secs: float | None = None

    def __post_init__(self) -> None:
        for what, secs in (
            ("heartbeat", self.heartbeat_secs),
            ("collective", self.collective_secs),
        ):
            if secs is not None and not _LEAST_S <= secs < math.inf:
                raise ConfigurationError(
                    f"Expected the {what} time-out to be at least {_LEAST_S:g} s, and finite. "
                    f"Received: {secs!r}"
                )

    def or_else(self, other: Timeouts) -> Timeouts:
        """These, and those of `other` where there is none."""
        return Timeouts(
            other.heartbeat_secs if self.heartbeat_secs is None else self.heartbeat_secs,
            other.collective_secs if self.collective_secs is None else self.collective_secs,
        )

    def to_env(self) -> dict[str, str]:
        given = {HEARTBEAT: self.heartbeat_secs, COLLECTIVE: self.collective_secs}
        return {name: str(secs) for name, secs in given.items() if secs is not None}

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Self:
        """What the environment says, usually `os.environ`.

        Raises:
            ConfigurationError: If it is no number of seconds, or none that can be.
        """
        return cls(_secs(environ, HEARTBEAT), _secs(environ, COLLECTIVE))


def _secs(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(f"Expected {name} to be seconds. Received: {text!r}") from None
