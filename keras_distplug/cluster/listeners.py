"""Threads that wait for messages of other workers, without the training thread."""

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
from keras_distplug.core.threads import call_before_threads_end

_CLOSED = "closed"
_PAUSE_S = 1.0  # before a retry
_TRIES = 5
_PATIENCE_S = 5.0  # for a message that is due, before it is requested again
_CLOSING_S = 5.0

Result = TypeVar("Result")


class Listener:
    """A thread that waits for messages until it is closed.

    It waits with one open request to the store, which costs nothing until a message arrives.
    `close` answers the request itself.

    Args:
        channel: The channel to the other workers, of one session.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._awaited: str | None = None
        self._closed = threading.Event()
        self._thread = run_in_background(self._run)
        close_at_exit(self)

    def _run(self) -> None:
        """Does the work of the thread."""
        raise NotImplementedError

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        """Ends the thread, and waits a few seconds until it has stopped."""
        if self._closed.is_set():
            return
        self._closed.set()
        if (awaited := self._awaited) is not None:

            def answer() -> None:
                # The chief, which keeps the messages, may be frozen or gone. The thread notices.
                with contextlib.suppress(AgreementError):
                    self._channel.send_once(awaited, _CLOSED)

            run_in_background(answer)
        self._join(_CLOSING_S)

    def _hear(self, topic: str) -> str | None:
        """Waits for a message without limit. Returns None once this is closed."""
        self._awaited = topic  # before the check, so that `close` cannot miss both
        if self._closed.is_set():
            return None
        text = self._channel.receive(topic, None)
        self._awaited = None
        return None if self._closed.is_set() else text

    def _join(self, timeout_s: float) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)


class Mailbox(Listener):
    """Receives letters until it is closed, and sends letters to all workers, including this one.

    Args:
        channel: The channel to the other workers, of one session.
        on_letter: Called in a thread with every letter.
        on_lost: Called in a thread with the error if workers can no longer communicate.
    """

    def __init__(
        self,
        channel: Channel,
        on_letter: Callable[[str], None],
        on_lost: Callable[[AgreementError], None],
    ) -> None:
        self._on_letter = on_letter
        self._on_lost = on_lost
        self._free = [0] * channel.role.world_size  # by rank: the first number that may be unused
        super().__init__(channel)

    def send(self, letter: str) -> None:
        """Sends `letter` to all workers, and waits until it is stored: forever, if the chief, which
        keeps the messages, is frozen.

        Raises:
            AgreementError: If it cannot be sent.
        """
        for rank, number in enumerate(self._free):
            while not self._channel.send_once(f"letter/{rank}/{number}", letter):
                number += 1
            self._free[rank] = max(self._free[rank], number + 1)

    def send_first(self, letter: str) -> None:
        """Sends `letter` in the background, unless a worker has done so before."""

        def send() -> None:
            try:
                # If the answer was lost, the stored name shows that this worker is the first.
                me = self._channel.role.name
                if self.post("told", me) or self.receive("told") == me:
                    self._persist(lambda: self.send(letter))
            except AgreementError as error:
                self._on_lost(error)

        run_in_background(send)

    def post(self, topic: str, text: str) -> bool:
        """Calls the channel's `send_once`, and retries after errors."""
        return self._persist(lambda: self._channel.send_once(topic, text))

    def receive(self, topic: str) -> str:
        """Calls the channel's `receive` until a worker is lost or this is closed."""
        return self._persist(lambda: self._channel.receive(topic, _PATIENCE_S))

    def _persist(self, ask: Callable[[], Result]) -> Result:
        """Repeats `ask` after timeouts, and a few times after other errors."""
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
    """Collects the n-th reports of all workers on the chief, until it is closed.

    Training never waits for reports. If messages are lost, reporting ends, and `on_lost` is called.

    Args:
        channel: The channel to the other workers, of one session.
        on_all: Called on the chief, in a thread, with the reports of all workers, by rank.
        on_lost: Called in a thread with the error if workers can no longer communicate.
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
        """Sends a report without waiting.

        Args:
            make: Makes the report, in a thread. It may raise AgreementError.

        Raises:
            RuntimeError: If an earlier report or the call of `on_all` failed.
        """
        if self._failure is not None:
            raise RuntimeError(
                f"The workers can no longer report to the chief: {self._failure}"
            ) from self._failure
        self._own.put(make)

    def close(self, last_secs: float = 0.0) -> None:
        """Ends the thread.

        Args:
            last_secs: Seconds to wait for reports that are not complete yet. Later ones are
                dropped. Defaults to 0.
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
                    self._collect(report, number)
                else:
                    self._channel.send_once(f"report/{number}/{role.rank}", report)
                number += 1
        except AgreementError as error:
            if not self._closed.is_set():
                self._on_lost(error)
        except Exception as error:  # noqa: BLE001 (raised by the next `send`)
            self._failure = error

    def _collect(self, own: str, number: int) -> None:
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


def run_in_background(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, name="keras_distplug-letters", daemon=True)
    thread.start()
    return thread


class Closes(Protocol):
    def close(self) -> None: ...


def close_at_exit(each: Closes) -> None:
    """Closes `each` before threads end.

    A thread that is still waiting for TensorFlow when Python ends aborts the process.
    """
    _register_closing()
    _open.add(each)


_open: weakref.WeakSet[Closes] = weakref.WeakSet()


@functools.cache
def _register_closing() -> None:
    call_before_threads_end(_close_all)
    # At its end, a forked child would close the connections of its parent.
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_open.clear)


def _close_all() -> None:
    for each in list(_open):
        each.close()
