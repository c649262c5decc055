"""Restarts single workers that compute for a chief, while the others continue."""

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
_MAX_NEVER_JOINED = 10  # consecutive exits of a worker before joining
_POLL_SECS = 0.1

_KILLED = tuple(-number for number in signals("SIGKILL", "SIGTERM"))

# Exit codes by which a worker asks not to be restarted.
_FINAL_CODES = (ExitCode.INTERRUPTED, ExitCode.DO_NOT_RESTART)


@dataclass(frozen=True)
class Death:
    """The exit of a worker.

    Args:
        worker: Name of the worker.
        has_joined: True if it had joined the cluster.
        was_killed: True if it was killed from outside, by SIGKILL or SIGTERM.
        saves: Step of the newest checkpoint so far, for every run.
    """

    worker: str
    has_joined: bool
    was_killed: bool
    saves: Mapping[str, int]


@dataclass(frozen=True)
class GiveUp:
    """A decision not to restart the worker, and to end the job.

    Args:
        why: Readable reason.
        code: Exit code of the job. Defaults to None, the worker's exit code.
    """

    why: str
    code: int | None = None


def decide(deaths: Sequence[Death], budget: int) -> float | GiveUp:
    """Decides after the exit of a worker: returns the seconds until its restart, or gives up.

    A newer checkpoint resets all counts: even workers that are killed every few seconds are
    restarted as long as training makes progress. The pause grows with a worker's consecutive exits
    before joining, unless it was killed: these are usually its own fault, and will recur.

    Args:
        deaths: All exits of this attempt, in order.
        budget: Number of restarts allowed without a newer checkpoint.
    """
    recent = _since_last_progress(deaths)
    worker = deaths[-1].worker
    if len(recent) > budget:
        often = "once" if budget == 1 else f"{budget} times"
        return GiveUp(
            f"gave up: workers were restarted {often} without a newer checkpoint "
            "(--max-worker-restarts)"
        )
    consecutive = _count_never_joined(worker, recent)
    if consecutive >= _MAX_NEVER_JOINED:
        return GiveUp(
            f"gave up: {worker} exited {consecutive} consecutive times before joining the cluster",
            ExitCode.DO_NOT_RESTART,
        )
    return 0.0 if deaths[-1].was_killed else pause_secs(consecutive, _LONGEST_PAUSE_SECS)


def pause_secs(consecutive: int, longest_secs: float) -> float:
    """Returns the pause after consecutive failures: none after the first, then doubling."""
    return min(_FIRST_PAUSE_SECS * 2 ** (consecutive - 2), longest_secs) if consecutive > 1 else 0.0


def is_newer(saves: Mapping[str, int], before: Mapping[str, int]) -> bool:
    """Returns True if a run has its first checkpoint, or a newer one than before."""
    return any(run not in before or step > before[run] for run, step in saves.items())


def _since_last_progress(deaths: Sequence[Death]) -> list[Death]:
    found: list[Death] = []
    newest = dict(deaths[0].saves)
    for death in deaths:
        if is_newer(death.saves, newest):
            found.clear()
        newest |= death.saves
        found.append(death)
    return found


def _count_never_joined(worker: str, deaths: Sequence[Death]) -> int:
    consecutive = 0
    for death in deaths:
        if death.worker == worker and (death.has_joined or not death.was_killed):
            consecutive = 0 if death.has_joined else consecutive + 1
    return consecutive


@dataclass(frozen=True)
class Replaced:
    """A worker that will be restarted.

    Args:
        exit: Exit of the worker.
        times: Number of worker restarts in this attempt, including this one.
        pause_secs: Delay before the restart, in seconds.
    """

    exit: Exit
    times: int
    pause_secs: float


@dataclass
class _Absent:
    replaced: Replaced
    ready_at: float | None = None  # set once all of its processes are gone
    is_started: bool = False


class Replacing:
    """Restarts workers of an attempt. Its methods never wait for a worker.

    Args:
        group: All processes of the attempt.
        contract: Contract that gives access to the workers' reports.
        joining: Watcher of the workers that must join.
        workers: Names of the workers that may be restarted.
        budget: Number of restarts allowed without a newer checkpoint.
        start: Function that starts the worker of a name.
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
        """The seconds within which `proceed` must be called."""
        return _POLL_SECS if self._absent else float("inf")

    @property
    def times(self) -> int:
        """The number of worker restarts."""
        return len(self._deaths) - (self.given_up is not None)

    def awaits(self, worker: str) -> bool:
        """Returns True if `worker` has exited and its replacement has not been started."""
        return worker in self._absent and not self._absent[worker].is_started

    def gone(self) -> list[Exit]:
        """Returns the exits of workers whose replacements have not been started."""
        return [each.replaced.exit for each in self._absent.values() if not each.is_started]

    def take(self, exits: Sequence[Exit]) -> list[Exit]:
        """Takes over the workers to restart. Returns the exits of the others."""
        return [exit_ for exit_ in exits if not self._take_over(exit_)]

    def proceed(self, on_replaced: Callable[[Replaced], None]) -> list[tuple[str, float]]:
        """Continues all pending restarts as far as possible.

        Args:
            on_replaced: Function called when all processes of a worker are gone, before its
                replacement is started.

        Returns:
            The workers that have rejoined, with the seconds since their exits.
        """
        return [
            (worker, time.time() - absent.replaced.exit.at)
            for worker, absent in list(self._absent.items())
            if self._advance(worker, absent, on_replaced)
        ]

    def _take_over(self, exit_: Exit) -> bool:
        worker = exit_.worker
        if worker not in self._workers or exit_.cause not in FAILURES:
            return False
        if exit_.exit_code in _FINAL_CODES or self.given_up:
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

    def _advance(
        self, worker: str, absent: _Absent, on_replaced: Callable[[Replaced], None]
    ) -> bool:
        if absent.is_started:
            is_back = self._contract.read(worker) is not None
            if is_back:
                del self._absent[worker]
            return is_back
        if absent.ready_at is None:
            # A late or silent worker is still running, and leftover processes may hold the port.
            if self._group.lives([worker]):
                self._group.signal(signal.SIGKILL, [worker])
                return False
            self._group.drain()  # print the worker's last output before the report
            on_replaced(absent.replaced)
            absent.ready_at = time.monotonic() + absent.replaced.pause_secs
        if time.monotonic() >= absent.ready_at:
            self._contract.forget(worker)  # a leftover process may have reported again
            self._start(worker)
            self._joining.expect(worker)
            absent.is_started = True
        return False
