"""Workers that compute for a chief: one that ends is started again alone, and the others go on."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from keras_distplug.core.exit_codes import ExitCode
from keras_distplug.core.operating_system import signals
from keras_distplug.core.supervised import Supervised
from keras_distplug.supervisor.exits import FAILURES, Exit
from keras_distplug.supervisor.group import Group
from keras_distplug.supervisor.joining import Joining

_FIRST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 1.0, 30.0
_NEVER_JOINED = 10  # ends in a row of one worker that it had not joined before
_LOOK_SECS = 0.1

_KILLED = tuple(-number for number in signals("SIGKILL", "SIGTERM"))

# Of a worker that says itself that it is not to be started again.
_NOT_AGAIN = (ExitCode.INTERRUPTED, ExitCode.DO_NOT_RESTART)


@dataclass(frozen=True)
class Death:
    """The end of one worker.

    Args:
        worker: Its name.
        has_joined: Whether it had joined the cluster.
        was_killed: Whether somebody else has ended it: by SIGKILL, or SIGTERM.
        saves: The step of the newest checkpoint by then, for each run.
    """

    worker: str
    has_joined: bool
    was_killed: bool
    saves: Mapping[str, int]


@dataclass(frozen=True)
class GiveUp:
    """Do not start it again, and end the job.

    Args:
        why: For people.
        code: The job's exit code; None for that of the worker.
    """

    why: str
    code: int | None = None


def decide(deaths: Sequence[Death], budget: int) -> float | GiveUp:
    """What comes after the end of a worker: the seconds until it is started again, or no more.

    A checkpoint that is newer than those before forgives all: killed every few seconds, workers are
    started again for as long as training gets on. The pause grows with the ends of one worker that
    had not joined, and that nobody has killed: these are its own fault, mostly, and come again.

    Args:
        deaths: All of this attempt, the last one last.
        budget: How many may be started again until there is a newer checkpoint.
    """
    unforgiven = _unforgiven(deaths)
    worker = deaths[-1].worker
    if len(unforgiven) > budget:
        often = "once" if budget == 1 else f"{budget} times"
        return GiveUp(
            f"gave up: workers were started again {often} without a newer checkpoint "
            "(--max-worker-restarts)"
        )
    in_a_row = _never_joined(worker, unforgiven)
    if in_a_row >= _NEVER_JOINED:
        return GiveUp(
            f"gave up: {worker} ended {in_a_row} times in a row before it had joined the cluster",
            ExitCode.DO_NOT_RESTART,
        )
    return 0.0 if deaths[-1].was_killed else pause_secs(in_a_row, _LONGEST_PAUSE_SECS)


def pause_secs(in_a_row: int, longest_secs: float) -> float:
    """How long to wait after so many failures in a row: not after the first, then ever longer."""
    return min(_FIRST_PAUSE_SECS * 2 ** (in_a_row - 2), longest_secs) if in_a_row > 1 else 0.0


def is_newer(saves: Mapping[str, int], before: Mapping[str, int]) -> bool:
    """Whether a run has a checkpoint that is newer than its one before, or its first one."""
    return any(run not in before or step > before[run] for run, step in saves.items())


def _unforgiven(deaths: Sequence[Death]) -> list[Death]:
    found: list[Death] = []
    newest = dict(deaths[0].saves)
    for death in deaths:
        if is_newer(death.saves, newest):
            found.clear()
        newest |= death.saves
        found.append(death)
    return found


def _never_joined(worker: str, deaths: Sequence[Death]) -> int:
    in_a_row = 0
    for death in deaths:
        if death.worker == worker and (death.has_joined or not death.was_killed):
            in_a_row = 0 if death.has_joined else in_a_row + 1
    return in_a_row


@dataclass(frozen=True)
class Replaced:
    """A worker that will be started again.

    Args:
        exit: How it ended.
        times: How often workers were started again in this attempt, this time included.
        pause_secs: For how long it is left alone before.
    """

    exit: Exit
    times: int
    pause_secs: float


@dataclass
class _Absent:
    replaced: Replaced
    ready_at: float | None = None  # once nothing of it lives
    is_started: bool = False


class Replacing:
    """Starts workers of one attempt again. None of its methods waits for one.

    Args:
        group: Of all processes.
        contract: Where they report.
        joining: Watches those that are started again.
        workers: Who may be started again.
        budget: As for `decide`.
        start: Starts the one of this name.
    """

    def __init__(
        self,
        group: Group,
        contract: Supervised,
        joining: Joining,
        workers: Sequence[str],
        budget: int,
        start: Callable[[str], object],
    ) -> None:
        self._group = group
        self._contract = contract
        self._joining = joining
        self._workers = workers
        self._budget = budget
        self._start = start
        self._absent: dict[str, _Absent] = {}
        self._deaths: list[Death] = []
        self.given_up: GiveUp | None = None

    @property
    def look_within_secs(self) -> float:
        """How soon `go_on` is to be called."""
        return _LOOK_SECS if self._absent else float("inf")

    @property
    def times(self) -> int:
        """How often workers were started again."""
        return len(self._deaths) - (self.given_up is not None)

    def awaits(self, worker: str) -> bool:
        """Whether its end is known already, and no other one has begun in its place."""
        return worker in self._absent and not self._absent[worker].is_started

    def gone(self) -> list[Exit]:
        """The ends of those in whose place no other one has begun."""
        return [each.replaced.exit for each in self._absent.values() if not each.is_started]

    def take(self, exits: Sequence[Exit]) -> list[Exit]:
        """Takes over whoever is to be started again, and returns the other ends."""
        return [exit_ for exit_ in exits if not self._takes(exit_)]

    def go_on(self, on_replaced: Callable[[Replaced], None]) -> list[tuple[str, float]]:
        """Does what can be done by now.

        Args:
            on_replaced: Called when nothing of a worker lives any more, before another one takes
                its place.

        Returns:
            Who has joined again, and after how many seconds.
        """
        return [
            (worker, time.time() - absent.replaced.exit.at)
            for worker, absent in list(self._absent.items())
            if self._is_back(worker, absent, on_replaced)
        ]

    def _takes(self, exit_: Exit) -> bool:
        worker = exit_.worker
        if worker not in self._workers or exit_.cause not in FAILURES:
            return False
        if exit_.exit_code in _NOT_AGAIN or self.given_up:
            return False
        has_joined = self._contract.read(worker) is not None
        was_killed = exit_.returncode in _KILLED
        saves = self._contract.newest_saves()
        self._deaths.append(Death(worker, has_joined, was_killed, saves))
        decided = decide(self._deaths, self._budget)
        if isinstance(decided, GiveUp):
            self.given_up = decided
            return False
        replaced = Replaced(exit_, self.times, decided)
        self._absent[worker] = _Absent(replaced)
        self._contract.forget(worker)
        self._joining.await_start(worker)
        return True

    def _is_back(
        self, worker: str, absent: _Absent, on_replaced: Callable[[Replaced], None]
    ) -> bool:
        if absent.is_started:
            is_back = self._contract.read(worker) is not None
            if is_back:
                del self._absent[worker]
            return is_back
        if absent.ready_at is None:
            # One that was late or silent runs, and what a command has left behind has the port.
            if self._group.lives([worker]):
                self._group.signal(signal.SIGKILL, [worker])
                return False
            self._group.drain()  # last words stand before the report
            on_replaced(absent.replaced)
            absent.ready_at = time.monotonic() + absent.replaced.pause_secs
        if time.monotonic() >= absent.ready_at:
            self._contract.forget(worker)  # what was left behind may have reported once more
            self._start(worker)
            self._joining.expect(worker)
            absent.is_started = True
        return False
