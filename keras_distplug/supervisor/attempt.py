"""Watches the workers of an attempt, and stops all of them if one fails."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.exit_codes import ExitCode
from keras_distplug.core.supervised import Phase, Status, Supervised
from keras_distplug.supervisor.exits import (
    FAILURES,
    SUCCESSES,
    Cause,
    Exit,
    earliest_first,
    judge,
    stopped,
)
from keras_distplug.supervisor.group import Ended, Group
from keras_distplug.supervisor.joining import Joining
from keras_distplug.supervisor.members import Members
from keras_distplug.supervisor.pulses import Pulses
from keras_distplug.supervisor.replacing import GiveUp, Replaced, Replacing

# After a worker's death, the others have nothing to save: they block in a collective that never
# finishes. Moreover, TensorFlow's preemption notifier swallows SIGTERM, so every second of grace
# only delays the recovery.
PEER_GRACE_SECS = 0.1

# Workers that serve a chief have nothing to save either once the chief is gone.
SERVER_GRACE_SECS = 2.0

_STATUS_POLL_SECS = 0.1

# A worker whose error makes another one exit may itself take longer to exit.
_CAUSE_SECS = 2.0


@dataclass(frozen=True)
class Limits:
    """Time limits of the supervisor.

    Args:
        startup_secs: Seconds for every one of several workers to join the cluster. Defaults to 300.
        grace_secs: Seconds between the user's SIGTERM or SIGINT and SIGKILL. Defaults to 30.
        silence_secs: Seconds without a sign of life of a worker, which gives one per second while
            it can run Python. Defaults to 300.

    Raises:
        ConfigurationError: If a limit is not positive (for `grace_secs`: negative) or not finite.
    """

    startup_secs: float = 300.0
    grace_secs: float = 30.0  # as in Kubernetes and in PreemptionHandler
    silence_secs: float = 300.0

    def __post_init__(self) -> None:
        for option, secs, bound in (
            ("--startup-timeout", self.startup_secs, "> 0"),
            ("--grace", self.grace_secs, ">= 0"),
            ("--unresponsive-timeout", self.silence_secs, "> 0"),
        ):
            if not 0 <= secs < math.inf or (secs == 0 and bound == "> 0"):
                raise ConfigurationError(
                    f"{option} must be {bound} s and finite. Received: {secs:g}"
                )


@dataclass(frozen=True)
class Outcome:
    """The outcome of an attempt.

    Args:
        exits: Exits of all workers, the earliest first.
        interrupted_by: Signal to the supervisor that ended the attempt; None if none did.
        ended_at: Time at which the last process was gone, in seconds since 1970.
        replaced: Number of restarts of single workers. Defaults to 0.
        given_up: Reason for giving up these restarts, if that ended the attempt. Defaults to None.
    """

    exits: tuple[Exit, ...]
    interrupted_by: signal.Signals | None
    ended_at: float
    replaced: int = 0
    given_up: GiveUp | None = None

    @property
    def first_failure(self) -> Exit | None:
        """The earliest failure, which caused the later ones. Preemptions count last."""
        failures = (exit_ for exit_ in self.exits if exit_.cause in FAILURES)
        return min(failures, key=lambda exit_: exit_.cause is Cause.PREEMPTED, default=None)

    @property
    def is_preempted(self) -> bool:
        """True if the workers exited because of a preemption, and none of them failed."""
        return self.first_failure is not None and self.first_failure.cause is Cause.PREEMPTED


@dataclass(frozen=True)
class Listener:
    """Callbacks during an attempt.

    Args:
        on_failure: Called with the failures, earliest first, once all other workers were signaled
            to stop.
        on_training: Called with the latest reports once all trainers have trained their first
            batch.
        on_replaced: Called when a worker has exited that will be restarted on its own.
        on_back: Called with the name of a restarted worker that has rejoined, and the seconds since
            its exit.
    """

    on_failure: Callable[[Sequence[Exit]], None]
    on_training: Callable[[Mapping[str, Status]], None]
    on_replaced: Callable[[Replaced], None]
    on_back: Callable[[str, float], None]


class Running:
    """A running attempt.

    Args:
        group: Processes of the attempt.
        members: Names of the processes.
        contract: Contract that gives access to the workers' reports.
        limits: Time limits.
        listener: Callbacks during the attempt.
        replacements: Number of restarts of single serving workers without a newer checkpoint.
        start: Function that restarts the worker of a name.
    """

    def __init__(
        self,
        group: Group,
        members: Members,
        contract: Supervised,
        limits: Limits,
        listener: Listener,
        replacements: int,
        start: Callable[[str], object],
    ) -> None:
        self._group = group
        self._members = members
        self._contract = contract
        self._limits = limits
        self._listener = listener
        self._joining = Joining(contract, members, limits.startup_secs)
        self._pulses = Pulses(contract, members.names, limits.silence_secs)
        self._replacing = Replacing(
            group, contract, self._joining, members.replaceable, replacements, start
        )
        self._is_training = False
        self._cause_by = math.inf
        self._exits: list[Exit] = []

    def until_end(self) -> Outcome:
        """Waits until all trainers are complete or a worker has failed, and stops the others."""
        while self._group.runs() and not self._is_completed():
            ended, signals = self._group.wait(self._timeout_secs())
            self._exits += [
                self._judge(each) for each in ended if not self._replacing.awaits(each.worker)
            ]
            if signals:
                return self._interrupted(signals)
            if not self._is_training and (reports := self._all_training()):
                self._listener.on_training(reports)
                self._is_training = True
            self._exits += self._overdue()
            self._exits = [self._unless_needed(each) for each in self._exits]
            # At the same time, a serving worker is the likelier cause than the chief it serves.
            self._exits.sort(key=lambda each: (earliest_first(each), self._trains(each)))
            if self._is_completed():
                break
            self._exits = self._replacing.take(self._exits)
            failures = [each for each in self._exits if each.cause in FAILURES]
            if failures and all(each.cause is Cause.PREEMPTED for each in failures):
                # All workers have agreed to stop.
                self._listener.on_failure(failures)
                signals = self._end(self._limits.grace_secs, self._judge)
                return self._outcome(signals)
            if failures and all(each.returncode == ExitCode.PEER_LOST for each in failures):
                self._cause_by = min(self._cause_by, time.monotonic() + _CAUSE_SECS)
                if self._group.runs() and time.monotonic() < self._cause_by:
                    continue
            if failures:
                return self._end_after(failures)
            for worker, secs in self._replacing.proceed(self._listener.on_replaced):
                self._listener.on_back(worker, secs)
        # Serving workers that have exited by this time are not failures.
        self._exits = [each for each in self._exits if self._trains(each)]
        self._end(0.0, self._judge)  # including processes that the trainers' commands started
        return self._outcome()

    def _timeout_secs(self) -> float:
        due = min(self._cause_by, self._joining.due)
        timeout_secs = min(max(0.0, due - time.monotonic()), self._pulses.look_every_secs)
        timeout_secs = min(timeout_secs, self._replacing.look_within_secs)
        return timeout_secs if self._is_training else min(timeout_secs, _STATUS_POLL_SECS)

    def _is_completed(self) -> bool:
        done = {each.worker for each in self._exits if each.cause in SUCCESSES}
        return done.issuperset(self._members.trainers)

    def _unless_needed(self, exit_: Exit) -> Exit:
        """Turns the exit of an untrained worker into a failure if another worker trains."""
        if exit_.cause is not Cause.UNTRAINED:
            return exit_
        others = (self._contract.read(each) for each in self._members.trainers)
        is_needed = any(each is not None and Phase.FITTING in each.since for each in others)
        return replace(exit_, cause=Cause.LEFT) if is_needed else exit_

    def _trains(self, exit_: Exit) -> bool:
        return exit_.worker in self._members.trainers

    def _judge(self, ended: Ended) -> Exit:
        serves = ended.worker in self._members.servers
        return judge(ended, self._contract.read(ended.worker), serves=serves)

    def _interrupted(self, signals: Sequence[signal.Signals]) -> Outcome:
        # Two signals within one iteration of the loop count as two.
        grace_secs = self._limits.grace_secs if len(signals) == 1 else 0.0
        self._group.signal(signals[0], self._members.trainers)
        self._exits += self._replacing.gone()
        self._end(grace_secs, stopped)
        return self._outcome(signals)

    def _end_after(self, failures: Sequence[Exit]) -> Outcome:
        self._group.signal(signal.SIGTERM)
        self._group.drain()  # print the workers' last output before the report
        self._listener.on_failure(failures)
        self._exits += self._replacing.gone()
        ended, signals = await_end(self._group, PEER_GRACE_SECS, hurry=False)
        self._add(ended, stopped)
        return self._outcome(signals)

    def _end(self, grace_secs: float, judge: Callable[[Ended], Exit]) -> list[signal.Signals]:
        """Waits for the trainers to exit, and then stops the workers that serve them.

        Args:
            grace_secs: Seconds that the trainers have before they are killed.
            judge: Function that determines why a trainer has exited.

        Returns:
            The signals received meanwhile.
        """
        members, gone = self._members, self._replacing.gone()
        ended, signals = await_end(self._group, grace_secs, hurry=True, workers=members.trainers)
        self._group.signal(signal.SIGTERM, members.servers)
        server_secs = 0.0 if signals else SERVER_GRACE_SECS
        later, more = await_end(self._group, server_secs, hurry=True, workers=members.servers)
        known = {exit_.worker for exit_ in gone}
        self._add([each for each in ended if each.worker in members.trainers], judge)
        serving = [each for each in [*ended, *later] if each.worker in members.servers]
        self._add([each for each in serving if each.worker not in known], stopped)
        return signals + more

    def _add(self, ended: Sequence[Ended], judge: Callable[[Ended], Exit]) -> None:
        # The exit of a late or silent worker, killed just now, is already recorded.
        known = {exit_.worker for exit_ in self._exits}
        self._exits += [judge(each) for each in ended if each.worker not in known]

    def _outcome(self, signals: Sequence[signal.Signals] = ()) -> Outcome:
        return Outcome(
            tuple(self._exits),
            signals[0] if signals else None,
            time.time(),
            self._replacing.times,
            self._replacing.given_up,
        )

    def _overdue(self) -> list[Exit]:
        """Returns failures of running workers that are late or silent."""
        now, limits = time.time(), self._limits
        found = [
            Exit(worker, Cause.LATE, None, now, limits.startup_secs)
            for worker in self._joining.late()
        ]
        found += [
            Exit(worker, Cause.SILENT, None, now, limits.silence_secs, state)
            for worker, state in self._pulses.look().items()
        ]
        gone = {exit_.worker for exit_ in self._exits}
        return [each for each in found if each.worker not in gone]

    def _all_training(self) -> dict[str, Status] | None:
        reports: dict[str, Status] = {}
        for worker in self._members.trainers:
            status = self._contract.read(worker)
            if status is None or Phase.TRAINING not in status.since:
                return None
            reports[worker] = status
        return reports


def await_end(
    group: Group, grace_secs: float, hurry: bool, workers: Collection[str] | None = None
) -> tuple[list[Ended], list[signal.Signals]]:
    """Waits until signaled workers have exited, and kills them after the grace period.

    Args:
        group: All workers.
        grace_secs: Grace period in seconds.
        hurry: True if a signal to the supervisor ends the grace period.
        workers: Names of the workers to wait for. Defaults to None, all workers.

    Returns:
        The ends of workers, including others, and the signals received meanwhile.
    """
    ended: list[Ended] = []
    signals: list[signal.Signals] = []
    deadline = time.monotonic() + grace_secs
    # SIGTERM kills a shell immediately, while the training that it started may still be saving.
    while group.lives(workers) and (remaining := deadline - time.monotonic()) > 0:
        is_polled = not group.runs(workers)  # exits of processes that they started are not reported
        more, told = group.wait(min(remaining, _STATUS_POLL_SECS) if is_polled else remaining)
        ended += more
        signals += told
        if hurry and signals:
            break
    ended += group.kill(workers)
    group.drain()
    return ended, signals
