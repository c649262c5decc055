"""Letters from worker to worker, read by a thread of their own.

A worker waits for its letters with one open question to whoever keeps the words, which costs
nothing while there are none.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from keras_distplug.cluster.roles import Role
from keras_distplug.core.errors import AgreementError
from keras_distplug.core.threads import before_threads_end

_CLOSED = "closed"
_PAUSE_S = 1.0  # before what has failed is tried again
_CLOSING_S = 5.0


class Words(Protocol):
    """What workers say to each other, from any thread."""

    def tell_first(self, topic: str, text: str) -> bool:
        """False if somebody has told it before."""
        ...

    def hear(self, topic: str, timeout_s: float | None) -> str:
        """Raises AgreementError; with a cause of TimeoutError if only the time is over."""
        ...


class Mailbox:
    """Receives letters until it is closed, and sends them to all workers, this one among them.

    Args:
        session: The same on all workers, and no other one's.
        role: This worker's place.
        words: Between the workers.
        on_letter: Called, from a thread, with each letter.
        on_lost: Called, from a thread, with what keeps the workers from hearing each other.
    """

    def __init__(
        self,
        session: str,
        role: Role,
        words: Words,
        on_letter: Callable[[str], None],
        on_lost: Callable[[AgreementError], None],
    ) -> None:
        self._session = session
        self._role = role
        self._words = words
        self._on_letter = on_letter
        self._on_lost = on_lost
        self._closed = threading.Event()
        self._free = [0] * role.world_size  # for each, the first number that may be
        self._thread = in_background(self._listen)

    def send(self, letter: str) -> None:
        """To all workers. Waits until it is on its way, for ever if who keeps the words is frozen.

        Raises:
            AgreementError: If that is not possible.
        """
        for rank in range(self._role.world_size):
            self._put(rank, letter)

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        # Who keeps the words may be frozen, or gone, which the thread hears, too.
        in_background(lambda: _try(lambda: self._put(self._role.rank, _CLOSED)))
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSING_S)

    def _put(self, rank: int, letter: str) -> None:
        number = self._free[rank]
        while not self._words.tell_first(self._topic(rank, number), letter):
            number += 1
        self._free[rank] = max(self._free[rank], number + 1)

    def _listen(self) -> None:
        number, is_lost = 0, False
        while not self._closed.is_set():
            try:
                letter = self._words.hear(self._topic(self._role.rank, number), None)
            except AgreementError as error:
                if not is_lost and not self._closed.is_set():
                    self._on_lost(error)
                is_lost = True
                self._closed.wait(_PAUSE_S)
                continue
            number += 1
            if letter != _CLOSED:
                self._on_letter(letter)

    def _topic(self, rank: int, number: int) -> str:
        return f"{self._session}/letter/{rank}/{number}"


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


def _try(act: Callable[[], object]) -> None:
    try:
        act()
    except AgreementError:
        return


@functools.cache
def _look_out_for_the_end() -> None:
    before_threads_end(_close_all)
    if hasattr(os, "register_at_fork"):
        # A child's end would close over the connections of its parent.
        os.register_at_fork(after_in_child=_open.clear)


def _close_all() -> None:
    for each in list(_open):
        each.close()
