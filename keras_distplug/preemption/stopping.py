"""Makes all workers stop after the same step when one of them is preempted.

In synchronous training, workers are never more than a step apart, but none knows which one is
ahead. So every worker reports its progress, and waits at the end of its next step until the chief
has announced the step to stop at, which no worker can have passed yet. Until a preemption, this
adds no communication.
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
    """The reason for stopping training.

    Args:
        what: Kind of notice, such as "SIGTERM" or "AWS notice of spot instance-action terminate".
        worker: Worker that was notified.
        at_unix_s: Time at which the machine goes away, in seconds since 1970.
        is_user: True for Ctrl-C. Defaults to False.
    """

    what: str
    worker: str
    at_unix_s: float
    is_user: bool = False


class Stop:
    """A request to stop, made from any thread. A single worker stops immediately."""

    def __init__(self) -> None:
        self._cause: Cause | None = None

    def request(self, cause: Cause) -> None:
        """Makes all workers stop soon. Only the first call has an effect. Never blocks."""
        self._cause = self._cause or cause

    def is_due(self) -> Cause | None:
        """Returns the cause once training should stop, else None.

        All workers call this at the same points, which are counted, and get the same answer.
        """
        return self._cause


class CollectiveStop(Stop):
    """Makes the workers of a cluster stop at the same point.

    The workers wait for one that does not answer: it may be frozen and recover. If messages cannot
    be delivered, training continues, and ends as it does when a worker is lost.

    Args:
        channel: Channel to the other workers, for this session.
        on_lost: Function called, from a thread, with the error if the workers cannot agree.
    """

    def __init__(self, channel: Channel, on_lost: Callable[[AgreementError], None]) -> None:
        super().__init__()
        self._role = channel.role
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._position = 0
        self._reported: int | None = None  # the progress that this worker has reported
        self._agreed = threading.Event()
        self._stop_at = 0
        self._mailbox = Mailbox(channel, self._agree, on_lost)

    def request(self, cause: Cause) -> None:
        # A scheduler may notify all workers at the same time; one message is enough.
        self._mailbox.send_first(json.dumps(asdict(cause)))

    def is_due(self) -> Cause | None:
        with self._lock:
            self._position += 1
            waits = self._reported is not None
        if not waits:
            return None
        self._agreed.wait()
        return self._cause if self._position >= self._stop_at else None

    def close(self) -> None:
        self._mailbox.close()

    def _agree(self, text: str) -> None:
        with self._lock:
            if self._reported is not None:
                return
            self._reported = self._position
        post, receive = self._mailbox.post, self._mailbox.receive
        try:
            post(f"moment/{self._role.rank}", str(self._reported))
            if self._role.is_chief:
                ranks = range(self._role.world_size)
                positions = [int(receive(f"moment/{rank}")) for rank in ranks]
                # All workers use the chief's cause, because they may have received different ones.
                post("stop", json.dumps([max(positions) + 1, text]))
            stop_at, text = json.loads(receive("stop"))
            self._stop_at, self._cause = stop_at, Cause(**json.loads(text))
        except AgreementError as error:
            if not self._mailbox.is_closed:
                self._on_lost(error)
        finally:
            self._agreed.set()
