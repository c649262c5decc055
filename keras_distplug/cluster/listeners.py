"""Threads that wait for messages of other workers, past the one that trains."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol, TypeVar

from keras_distplug.cluster.channel import Channel
from keras_distplug.core.errors import AgreementError
from keras_distplug.core.threads import before_threads_end

_CLOSED = "closed"
_PAUSE_S = 1.0  # before what has failed is tried again
_TRIES = 5
_PATIENCE_S = 5.0  # for a message that is due; then it is asked for again
_CLOSING_S = 5.0

Result = TypeVar("Result")


class Listener:
    """A thread that waits for messages until it is closed.

    It waits with one open request to the store, which costs nothing while there are no messages.
    `close` answers the request itself.

    Args:
        channel: To the other workers, of one session.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._awaited: str | None = None
        self._closed = threading.Event()
        self._thread = in_background(self._run)
        close_at_exit(self)

    def _run(self) -> None:
        """Do the work of the thread."""
        raise NotImplementedError

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        """End the thread, and wait a few seconds for that."""
        if self._closed.is_set():
            return
        self._closed.set()
        if (awaited := self._awaited) is not None:

            def answer() -> None:
                # Who keeps the messages may be frozen, or gone, which the thread hears, too.
                with contextlib.suppress(AgreementError):
                    self._channel.tell_first(awaited, _CLOSED)

            in_background(answer)
        self._join(_CLOSING_S)

    def _hear(self, topic: str) -> str | None:
        """Wait for a message without a limit. Return None once this is closed."""
        self._awaited = topic  # before it looks, so that `close` cannot miss both
        if self._closed.is_set():
            return None
        text = self._channel.hear(topic, None)
        self._awaited = None
        return None if self._closed.is_set() else text

    def _join(self, timeout_s: float) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)


class Mailbox(Listener):
    """Receives letters until it is closed, and sends them to all workers, this one among them.

    Args:
        channel: As of `Listener`.
        on_letter: Called, from a thread, with each letter.
        on_lost: Called, from a thread, with what keeps the workers from hearing each other.
    """

    def __init__(
        self,
        channel: Channel,
        on_letter: Callable[[str], None],
        on_lost: Callable[[AgreementError], None],
    ) -> None:
        self._on_letter = on_letter
        self._on_lost = on_lost
        self._free = [0] * channel.role.world_size  # for each, the first number that may be
        super().__init__(channel)

    def send(self, letter: str) -> None:
        """To all workers. Waits until it is on its way, for ever if who keeps the messages is
        frozen.

        Raises:
            AgreementError: If that is not possible.
        """
        for rank, number in enumerate(self._free):
            while not self._channel.tell_first(f"letter/{rank}/{number}", letter):
                number += 1
            self._free[rank] = max(self._free[rank], number + 1)

    def send_first(self, letter: str) -> None:
        """Send `letter`, in the background, unless a worker has sent one in this way before."""

        def send() -> None:
            try:
                # One whose answer was lost is the first, too.
                me = self._channel.role.name
                if self.tell("told", me) or self.hear("told") == me:
                    self._persist(lambda: self.send(letter))
            except AgreementError as error:
                self._on_lost(error)

        in_background(send)

    def tell(self, topic: str, text: str) -> bool:
        """As the channel's `tell_first`, trying again what fails."""
        return self._persist(lambda: self._channel.tell_first(topic, text))

    def hear(self, topic: str) -> str:
        """As the channel's `hear`, for as long as no worker is lost and this is not closed."""
        return self._persist(lambda: self._channel.hear(topic, _PATIENCE_S))

    def _persist(self, ask: Callable[[], Result]) -> Result:
        """Asks again for what is not told yet, and a few times for what fails."""
        tries = 0
        while True:
            try:
                return ask()
            except AgreementError as error:
                tries += not isinstance(error.__cause__, TimeoutError)
                if tries == _TRIES or self._closed.is_set():
                    raise
                self._closed.wait(_PAUSE_S if tries else 0)

    def _run(self) -> None:
        number, is_lost = 0, False
        while not self._closed.is_set():
            try:
                letter = self._hear(f"letter/{self._channel.role.rank}/{number}")
            except AgreementError as error:
                if not is_lost and not self._closed.is_set():
                    self._on_lost(error)
                is_lost = True
                self._closed.wait(_PAUSE_S)
                continue
            number += 1
            if letter is not None:
                self._on_letter(letter)


class Reports(Listener):
    """Brings the n-th reports of all workers together, on the chief, until it is closed.

    Nobody waits for them. If messages are lost, there are no more reports, which is told.

    Args:
        channel: As of `Listener`.
        on_all: Called on the chief, from a thread, with the reports of all, by rank.
        on_lost: Called, from a thread, with what keeps the workers from hearing each other.
    """

    def __init__(
        self,
        channel: Channel,
        on_all: Callable[[list[str]], None],
        on_lost: Callable[[AgreementError], None],
    ) -> None:
        self._on_all = on_all
        self._on_lost = on_lost
        self._own: SimpleQueue[Callable[[], str] | None] = SimpleQueue()
        self._failure: Exception | None = None
        super().__init__(channel)

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
        if last_secs:
            self._join(last_secs)
        super().close()

    def _run(self) -> None:
        role, number = self._channel.role, 0
        try:
            while (make := self._own.get()) is not None and not self._closed.is_set():
                report = make()
                if role.is_chief:
                    self._bring_together(report, number)
                else:
                    self._channel.tell_first(f"report/{number}/{role.rank}", report)
                number += 1
        except AgreementError as error:
            if not self._closed.is_set():
                self._on_lost(error)
        except Exception as error:  # noqa: BLE001 (told by the next `send`)
            self._failure = error

    def _bring_together(self, own: str, number: int) -> None:
        reports = []
        for rank in range(self._channel.role.world_size):
            is_own = rank == self._channel.role.rank
            report = own if is_own else self._hear(f"report/{number}/{rank}")
            if report is None:
                break
            reports.append(report)
        self._channel.forget(f"report/{number}")  # the store lives as long as the job
        if not self._closed.is_set():
            self._on_all(reports)


def in_background(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, name="keras_distplug-letters", daemon=True)
    thread.start()
    return thread


class Closes(Protocol):
    def close(self) -> None: ...


def close_at_exit(each: Closes) -> None:
    """A thread that hears of its end from TensorFlow's, when Python's has come, aborts the
    process."""
    _look_out_for_the_end()
    _open.add(each)


_open: weakref.WeakSet[Closes] = weakref.WeakSet()


@functools.cache
def _look_out_for_the_end() -> None:
    before_threads_end(_close_all)
    # A child's end would close over the connections of its parent.
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_open.clear)


def _close_all() -> None:
    for each in list(_open):
        each.close()
