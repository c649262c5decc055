"""How all workers come to stop behind the same step, when one of them is told to go.

The workers of a synchronous training are never more than a step apart, but nobody knows which one
is ahead. So each one says how far it has come, and waits at the end of its next step until the
first worker has named the furthest of them. No worker can have passed that, and in the steps before
a notice there is nothing to ask: it costs them nothing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

from keras_distplug.cluster.mailbox import Mailbox, Words, close_at_exit, in_background
from keras_distplug.cluster.roles import Role
from keras_distplug.core.errors import AgreementError

_PATIENCE_S = 5.0  # for a word that is due; then it is asked for again
_PAUSE_S = 1.0  # before what has failed is tried again
_TRIES = 5

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
        self._mailbox = Mailbox(session, role, words, self._agree, on_lost)
        close_at_exit(self)

    def tell(self, cause: Cause) -> None:
        text = json.dumps(asdict(cause))

        def tell() -> None:
            # A scheduler may tell all workers at once, and one letter to each is enough.
            topic, me = self._topic("told", None), self._role.name
            try:
                is_first = self._persist(lambda: self._words.tell_first(topic, me))
                if is_first or self._hear("told", None) == me:
                    self._persist(lambda: self._mailbox.send(text))
            except AgreementError as error:
                self._on_lost(error)

        in_background(tell)

    def is_due(self) -> Cause | None:
        with self._lock:
            self._moment += 1
            waits = self._said is not None
        if not waits:
            return None
        self._agreed.wait()
        return self._cause if self._moment >= self._stop_at else None

    def close(self) -> None:
        self._closed.set()
        self._mailbox.close()

    def _agree(self, text: str) -> None:
        with self._lock:
            if self._said is not None:
                return
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
        topic = self._topic(what, rank)
        return self._persist(lambda: self._words.hear(topic, _PATIENCE_S))

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

    def _topic(self, what: str, rank: int | None) -> str:
        return f"{self._session}/{what}" + ("" if rank is None else f"/{rank}")
