"""How all workers come to stop behind the same step, when one of them is told to go.

The workers of a synchronous training are never more than a step apart, but nobody knows which one
is ahead. So each one says how far it has come, and waits at the end of its next step until the
first worker has named the furthest of them. No worker can have passed that, and in the steps before
a notice there is nothing to ask: it costs them nothing.
"""

from __future__ import annotations

import atexit
import functools
import json
import threading
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

from keras_distplug.cluster.roles import Role
from keras_distplug.core.errors import AgreementError

_CLOSED = "closed"
_PATIENCE_S = 5.0  # for a word that is due; then it is asked for again
_PAUSE_S = 1.0  # before what has failed is tried again
_TRIES = 5
_CLOSING_S = 5.0

Result = TypeVar("Result")


@dataclass(frozen=True)
class Cause:
    """Why training has to stop.

    Args:
        what: Such as "SIGTERM" or "AWS spot instance-action terminate".
        worker: Who was told.
        at_unix_s: When the machine goes away.
        is_user: Whether it was a person at the keyboard.
    """

    what: str
    worker: str
    at_unix_s: float
    is_user: bool = False


class Stop(Protocol):
    """Told from any thread, asked by the one that trains."""

    def tell(self, cause: Cause) -> None:
        """Makes all workers stop soon. Whatever is told after the first time has no effect. Never
        waits."""
        ...

    def is_due(self) -> Cause | None:
        """To be asked by all workers at the same moments, each of which it counts. The same answer
        for all of them."""
        ...

    def close(self) -> None: ...


class Words(Protocol):
    """What workers say to each other, from any thread."""

    def tell_first(self, topic: str, text: str) -> bool:
        """False if somebody has told it before."""
        ...

    def hear(self, topic: str, timeout_s: float | None) -> str:
        """Raises AgreementError; with a cause of TimeoutError if only the time is over."""
        ...


class StopAlone:
    """The only worker stops at once."""

    def __init__(self) -> None:
        self._cause: Cause | None = None

    def tell(self, cause: Cause) -> None:
        self._cause = self._cause or cause

    def is_due(self) -> Cause | None:
        return self._cause

    def close(self) -> None:
        return


class StopTogether:
    """The workers of a cluster stop at the same moment.

    A worker that does not answer may be frozen, and come back: the others wait for it. Where the
    words themselves are lost, training goes on, to end as it does when a worker is lost.

    Args:
        session: The same on all workers, and no other one's.
        role: This worker's place.
        words: Between the workers.
        on_lost: Called, from a thread, with what keeps the workers from agreeing.
    """

    def __init__(
        self, session: str, role: Role, words: Words, on_lost: Callable[[AgreementError], None]
    ) -> None:
        self._session = session
        self._role = role
        self._words = words
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._moment = 0
        self._said: int | None = None  # the moment up to which this worker had come
        self._agreed = threading.Event()
        self._cause: Cause | None = None
        self._stop_at = 0
        self._closed = threading.Event()
        self._thread = _in_background(self._listen)
        _close_at_exit()
        _open.add(self)

    def tell(self, cause: Cause) -> None:
        text = json.dumps(asdict(cause))

        def tell() -> None:
            try:
                # One word for each, so that each can wake itself to close.
                for rank in range(self._role.world_size):
                    self._say("told", rank, text)
            except AgreementError as error:
                self._on_lost(error)

        _in_background(tell)

    def is_due(self) -> Cause | None:
        with self._lock:
            self._moment += 1
            waits = self._said is not None
        if not waits:
            return None
        self._agreed.wait()
        return self._cause if self._moment >= self._stop_at else None

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        topic = self._topic("told", self._role.rank)
        # Who keeps the words may be frozen, or gone, which the thread hears, too.
        _in_background(lambda: _try(lambda: self._words.tell_first(topic, _CLOSED)))
        self._thread.join(_CLOSING_S)

    def _listen(self) -> None:
        is_lost = False
        while not self._closed.is_set():
            try:
                text = self._words.hear(self._topic("told", self._role.rank), None)
            except AgreementError as error:
                if not is_lost and not self._closed.is_set():
                    self._on_lost(error)
                is_lost = True
                self._closed.wait(_PAUSE_S)
                continue
            if text != _CLOSED:
                self._agree(text)
            return

    def _agree(self, text: str) -> None:
        with self._lock:
            self._said = self._moment
        try:
            self._say("moment", self._role.rank, str(self._said))
            if self._role.is_chief:
                everybody = range(self._role.world_size)
                moments = [int(self._hear("moment", rank)) for rank in everybody]
                # The chief's cause is everybody's: two may have been told different ones.
                self._say("stop", None, json.dumps([max(moments) + 1, text]))
            stop_at, text = json.loads(self._hear("stop", None))
            self._stop_at, self._cause = stop_at, Cause(**json.loads(text))
        except AgreementError as error:
            if not self._closed.is_set():
                self._on_lost(error)
        finally:
            self._agreed.set()

    def _say(self, what: str, rank: int | None, text: str) -> None:
        self._persist(lambda: self._words.tell_first(self._topic(what, rank), text))

    def _hear(self, what: str, rank: int | None) -> str:
        return self._persist(lambda: self._words.hear(self._topic(what, rank), _PATIENCE_S))

    def _persist(self, ask: Callable[[], Result]) -> Result:
        tries = 0
        while True:
            try:
                return ask()
            except AgreementError as error:
                tries += not isinstance(error.__cause__, TimeoutError)
                if tries == _TRIES or self._closed.is_set():
                    raise
                self._closed.wait(_PAUSE_S if tries else 0)

    def _topic(self, what: str, rank: int | None) -> str:
        return f"{self._session}/{what}" + ("" if rank is None else f"/{rank}")


_open: weakref.WeakSet[StopTogether] = weakref.WeakSet()


def _in_background(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, name="keras_distplug-stop", daemon=True)
    thread.start()
    return thread


def _try(act: Callable[[], object]) -> None:
    try:
        act()
    except AgreementError:
        return


@functools.cache
def _close_at_exit() -> None:
    # A thread that hears of its end from TensorFlow's, when Python's has come, aborts the process.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_close_all)


def _close_all() -> None:
    for each in list(_open):
        each.close()
