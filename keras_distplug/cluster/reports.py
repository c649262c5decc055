"""What all workers report to the chief, again and again, past the thread that trains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from keras_distplug.cluster.mailbox import close_at_exit, in_background
from keras_distplug.cluster.roles import Role
from keras_distplug.core.errors import AgreementError

_CLOSING_S = 5.0
_CLOSED = "closed"


class Words(Protocol):
    """What workers say to each other, from any thread."""

    def tell_first(self, topic: str, text: str) -> bool:
        """False if somebody has told it before."""
        ...

    def hear(self, topic: str, timeout_s: float | None) -> str:
        """Raises AgreementError."""
        ...

    def forget(self, topic: str) -> None:
        """Makes room, of topics below this one, too."""
        ...


class Reports:
    """Brings the n-th reports of all workers together, on the chief, until it is closed.

    Nobody waits for them. If words are lost, there are no more reports, which is told.

    Args:
        session: The same on all workers, and no other one's.
        role: This worker's place.
        words: Between the workers.
        on_all: Called on the chief, from a thread, with the reports of all, by rank.
        on_lost: Called, from a thread, with what keeps the workers from hearing each other.
    """

    def __init__(
        self,
        session: str,
        role: Role,
        words: Words,
        on_all: Callable[[list[str]], None],
        on_lost: Callable[[AgreementError], None],
    ) -> None:
        self._session = session
        self._role = role
        self._words = words
        self._on_all = on_all
        self._on_lost = on_lost
        self._own: SimpleQueue[Callable[[], str] | None] = SimpleQueue()
        self._awaited: str | None = None
        self._failure: Exception | None = None
        self._closed = threading.Event()
        self._thread = in_background(self._run)
        close_at_exit(self)

    def send(self, make: Callable[[], str]) -> None:
        """Never waits: `make` makes the report in a thread, and may raise AgreementError.

        Raises:
            RuntimeError: If an earlier one has failed, or what was called with it.
        """
        if self._failure is not None:
            raise RuntimeError(
                f"What workers report to the chief has failed: {self._failure}"
            ) from self._failure
        self._own.put(make)

    def close(self, last_secs: float = 0.0) -> None:
        """Ends what is under way.

        Args:
            last_secs: How long to wait for reports that are not together yet, which are of no use
                any more then.
        """
        if self._closed.is_set():
            return
        self._own.put(None)
        if last_secs and threading.current_thread() is not self._thread:
            self._thread.join(last_secs)
        self._closed.set()
        if (awaited := self._awaited) is not None:
            in_background(lambda: self._try_to_tell(awaited))
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSING_S)

    def _run(self) -> None:
        number = 0
        try:
            while (make := self._own.get()) is not None and not self._closed.is_set():
                report = make()
                if self._role.is_chief:
                    self._bring_together(report, number)
                else:
                    self._words.tell_first(self._topic(self._role.rank, number), report)
                number += 1
        except AgreementError as error:
            if not self._closed.is_set():
                self._on_lost(error)
        except Exception as error:  # noqa: BLE001 (told by the next `send`)
            self._failure = error

    def _bring_together(self, own: str, number: int) -> None:
        reports = []
        for rank in range(self._role.world_size):
            topic = self._topic(rank, number)
            reports.append(own if rank == self._role.rank else self._heard(topic))
            if self._closed.is_set():
                break
        # The store lives as long as the job.
        self._words.forget(self._topic(None, number))
        if not self._closed.is_set():
            self._on_all(reports)

    def _heard(self, topic: str) -> str:
        self._awaited = topic
        if self._closed.is_set():
            return _CLOSED
        report = self._words.hear(topic, None)
        self._awaited = None
        return report

    def _try_to_tell(self, awaited: str) -> None:
        try:
            self._words.tell_first(awaited, _CLOSED)
        except AgreementError:
            return

    def _topic(self, rank: int | None, number: int) -> str:
        return f"{self._session}/report/{number}" + ("" if rank is None else f"/{rank}")
