"""Detects workers that do not join the cluster in time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from keras_distplug.core.supervised import Supervised
from keras_distplug.supervisor.members import Members


class Joining:
    """Watches for workers that have not joined yet.

    Args:
        contract: Contract that gives access to the workers' reports.
        members: Processes that should join. A single worker has no cluster to join, so it has no
            time limit.
        limit_secs: Seconds that a process may take. A chief joins after the processes that serve
            it, so its time starts when they have joined.
        clock: Clock in seconds. Defaults to `time.monotonic`.
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
        """The time, by the clock, at which the next process will be late."""
        return min(self._due.values(), default=math.inf)

    def expect(self, worker: str) -> None:
        """Expects `worker` to join in time: it has been restarted."""
        self._due[worker] = self._clock() + self._limit_secs

    def await_start(self, worker: str) -> None:
        """Suspends the limit of `worker`, which has exited, until it is restarted."""
        self._due[worker] = math.inf

    def late(self) -> list[str]:
        """Returns workers that have become late. Returns every worker only once."""
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
