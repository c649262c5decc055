"""How long the network takes from a worker to the chief and back."""

from __future__ import annotations

import time
from collections.abc import Callable

from keras_distplug.core.protocols import Exchange

PAYLOAD_BYTES = 2**18  # more than what a slow line may let pass at once
_TRIES = 3
_ANSWER_S = 60.0


class RoundTrips:
    """Times messages that go to whoever keeps the words, and come back.

    What a message of no size takes is told from what each byte takes, so that larger ones can be
    reckoned.

    Args:
        topic: That nobody else has.
        exchange: Between the workers.
        every_secs: What is known is taken again for so long.
        now_s: A clock.
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
        self._known: tuple[float, float, float] | None = None  # when, for none, for each byte

    def seconds_for(self, message_bytes: int) -> tuple[float, bool]:
        """How long a message of that size takes, and whether that was measured just now.

        Raises:
            AgreementError: If none comes back.
        """
        is_due = self._known is None or self._now_s() - self._known[0] >= self._every_secs
        if self._known is None or is_due:
            empty_s, full_s = (
                min(self._taken_s(size) for _ in range(_TRIES)) for size in (1, PAYLOAD_BYTES)
            )
            self._known = self._now_s(), empty_s, max(0.0, full_s - empty_s) / PAYLOAD_BYTES
        _, empty_s, byte_s = self._known
        return empty_s + message_bytes * byte_s, is_due

    def _taken_s(self, message_bytes: int) -> float:
        topic = f"{self._topic}/{self._number}"
        self._number += 1
        begun_s = self._now_s()
        self._exchange.tell(topic, "-" * message_bytes)
        self._exchange.hear(topic, _ANSWER_S)
        taken_s = self._now_s() - begun_s
        self._exchange.forget(topic)
        return taken_s
