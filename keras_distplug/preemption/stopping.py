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

from keras_distplug.cluster.channel import Channel
from keras_distplug.cluster.listeners import Mailbox
from keras_distplug.core.errors import AgreementError


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


class Stop:
    """Told from any thread, asked by the one that trains. The only worker stops at once."""

    def __init__(self) -> None:
        self._cause: Cause | None = None

    def tell(self, cause: Cause) -> None:
        """Makes all workers stop soon. Whatever is told after the first time has no effect. Never
        waits."""
        self._cause = self._cause or cause

    def is_due(self) -> Cause | None:
        """To be asked by all workers at the same moments, each of which it counts. The same answer
        for all of them."""
        return self._cause


class StopTogether(Stop):
    """The workers of a cluster stop at the same moment.

    A worker that does not answer may be frozen, and come back: the others wait for it. Where the
    messages themselves are lost, training goes on, to end as it does when a worker is lost.

    Args:
        channel: To the other workers, of this session.
        on_lost: Called, from a thread, with what keeps the workers from agreeing.
    """

    def __init__(self, channel: Channel, on_lost: Callable[[AgreementError], None]) -> None:
        super().__init__()
        self._role = channel.role
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._moment = 0
        self._said: int | None = None  # the moment up to which this worker had come
        self._agreed = threading.Event()
        self._stop_at = 0
        self._mailbox = Mailbox(channel, self._agree, on_lost)

    def tell(self, cause: Cause) -> None:
        # A scheduler may tell all workers at once, and one letter to each is enough.
        self._mailbox.send_first(json.dumps(asdict(cause)))

    def is_due(self) -> Cause | None:
        with self._lock:
            self._moment += 1
            waits = self._said is not None
        if not waits:
            return None
        self._agreed.wait()
        return self._cause if self._moment >= self._stop_at else None

    def close(self) -> None:
        self._mailbox.close()

    def _agree(self, text: str) -> None:
        with self._lock:
            if self._said is not None:
                return
            self._said = self._moment
        tell, hear = self._mailbox.tell, self._mailbox.hear
        try:
            tell(f"moment/{self._role.rank}", str(self._said))
            if self._role.is_chief:
                everybody = range(self._role.world_size)
                moments = [int(hear(f"moment/{rank}")) for rank in everybody]
                # The chief's cause is everybody's: two may have been told different ones.
                tell("stop", json.dumps([max(moments) + 1, text]))
            stop_at, text = json.loads(hear("stop"))
            self._stop_at, self._cause = stop_at, Cause(**json.loads(text))
        except AgreementError as error:
            if not self._mailbox.is_closed:
                self._on_lost(error)
        finally:
            self._agreed.set()
