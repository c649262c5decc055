"""Timeouts after which an unresponsive worker counts as lost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from keras_distplug.core.errors import ConfigurationError

HEARTBEAT = "KERAS_DISTPLUG_HEARTBEAT_TIMEOUT"
COLLECTIVE = "KERAS_DISTPLUG_COLLECTIVE_TIMEOUT"

_MIN_S = 1.0  # a heartbeat may take this long on a busy machine


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of TensorFlow's cluster, the same on all workers.

    Args:
        heartbeat_secs: Seconds after which a worker without heartbeats is lost. Defaults to None,
            TensorFlow's own timeout.
        collective_secs: Seconds that workers wait for each other within a step. Defaults to None,
            TensorFlow's own timeout.

    Raises:
        ConfigurationError: If a timeout is below 1 s or not finite.
    """

    heartbeat_secs: float | None = None
    collective_secs: float | None = None

    def __post_init__(self) -> None:
        for what, secs in (
            ("heartbeat", self.heartbeat_secs),
            ("collective", self.collective_secs),
        ):
            if secs is not None and not _MIN_S <= secs < math.inf:
                raise ConfigurationError(
                    f"Expected the {what} timeout to be finite and at least {_MIN_S:g} s. "
                    f"Received: {secs!r}"
                )

    def or_else(self, other: Timeouts) -> Timeouts:
        """Returns these timeouts, with missing ones taken from `other`."""
        return Timeouts(
            other.heartbeat_secs if self.heartbeat_secs is None else self.heartbeat_secs,
            other.collective_secs if self.collective_secs is None else self.collective_secs,
        )

    def to_env(self) -> dict[str, str]:
        given = {HEARTBEAT: self.heartbeat_secs, COLLECTIVE: self.collective_secs}
        return {name: str(secs) for name, secs in given.items() if secs is not None}

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Self:
        """Reads the timeouts from an environment, usually `os.environ`.

        Raises:
            ConfigurationError: If a value is not a number, or out of range.
        """
        return cls(_secs(environ, HEARTBEAT), _secs(environ, COLLECTIVE))


def _secs(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(
            f"Expected {name} to be a number of seconds. Received: {text!r}"
        ) from None
