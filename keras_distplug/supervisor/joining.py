"""Who has not joined the cluster in time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from keras_distplug.core.supervised import Supervised
from keras_distplug.supervisor.members import Members


class Joining:
    """Watches who has yet to join.

    Args:
        contract: Where the workers report.
        members: Who is to join. A single worker has no cluster to join, and may prepare its data
            for as long as it likes.
        limit_secs: How long each may take. A chief joins behind whoever serves it, and its time
            begins when these are there.
        clock: In seconds.
    """

    def __init__(
        self,
        contract: Supervised,
        members: Members,
        limit_secs: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._contract = contract
        self._members = members
        self._limit_secs = limit_secs
        self._clock = clock
        expected = members.names if len(members.names) > 1 else ()
        self._due = dict.fromkeys(expected, clock() + limit_secs)

    @property
    def due(self) -> float:
        """When somebody will be late, by the clock."""
        return min(self._due.values(), default=math.inf)

    def expect(self, worker: str) -> None:
        """It was started again."""
        self._due[worker] = self._clock() + self._limit_secs

    def await_start(self, worker: str) -> None:
        """It has ended, and will be started again; until then it cannot be late."""
        self._due[worker] = math.inf

    def late(self) -> list[str]:
        """Who is. Each is told once."""
        now = self._clock()
        self._due = {
            worker: due for worker, due in self._due.items() if self._contract.read(worker) is None
        }
        if any(server in self._due for server in self._members.servers):
            waiting = (each for each in self._members.trainers if each in self._due)
            self._due |= dict.fromkeys(waiting, now + self._limit_secs)
        late = [worker for worker, due in self._due.items() if now >= due]
        for worker in late:
            del self._due[worker]
        return late
