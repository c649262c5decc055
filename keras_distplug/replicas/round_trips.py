"""Measures network round trips from a worker to the chief and back."""

from __future__ import annotations

import time
from collections.abc import Callable

from keras_distplug.core.protocols import Exchange

PAYLOAD_BYTES = 2**18  # more than a slow link's burst allowance
_TRIES = 3
_ANSWER_S = 60.0


class RoundTrips:
    """Times messages to the process that stores the workers' messages, and back.

    The latency of an empty message and the time per byte are measured separately, so that the time
    of a larger message can be extrapolated.

    Args:
        topic: A topic that no other user of `exchange` has.
        exchange: The exchange between the workers.
        every_secs: The interval between measurements, in seconds.
        now_s: A clock, in seconds.
    """

    def __init__(
        self,
        topic: str,
        exchange: Exchange,
        every_secs: float,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._topic = topic
        self._exchange = exchange
        self._every_secs = every_secs
        self._now_s = now_s
        self._number = 0
        self._measured: tuple[float, float, float] | None = None  # measured at, latency, per byte

    def seconds_for(self, message_bytes: int) -> tuple[float, bool]:
        """Returns the round-trip time of a message of that size, and True if it is newly measured.

        Raises:
            AgreementError: If a message does not come back.
        """
        is_due = self._measured is None or self._now_s() - self._measured[0] >= self._every_secs
        if self._measured is None or is_due:
            empty_s, full_s = (
                min(self._measure_s(size) for _ in range(_TRIES)) for size in (1, PAYLOAD_BYTES)
            )
            self._measured = self._now_s(), empty_s, max(0.0, full_s - empty_s) / PAYLOAD_BYTES
        _, empty_s, byte_s = self._measured
        return empty_s + message_bytes * byte_s, is_due

    def _measure_s(self, message_bytes: int) -> float:
        topic = f"{self._topic}/{self._number}"
        self._number += 1
        start_s = self._now_s()
        self._exchange.send(topic, "-" * message_bytes)
        self._exchange.receive(topic, _ANSWER_S)
        taken_s = self._now_s() - start_s
        self._exchange.forget(topic)
        return taken_s
