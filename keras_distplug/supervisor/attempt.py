"""One attempt: start all workers, watch them, and end all of them when one fails."""

from __future__ import annotations

import enum
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.exit_codes import ExitCode
from keras_distplug.core.supervised import Phase, Status, Supervised
from keras_distplug.supervisor.group import Ended, Group
from keras_distplug.supervisor.pulses import Pulses

# After a worker's death the others have nothing to save: they block in a collective that never
# ends. TensorFlow's preemption notifier swallows SIGTERM besides, so every second given here is a
# second added to the recovery.
PEER_GRACE_SECS = 0.3

_STATUS_POLL_SECS = 0.1

# Whose error makes another worker leave may take longer to end than that one.
_CAUSE_SECS = 2.0


class Cause(enum.Enum):
    """Why a worker has ended."""

    COMPLETED = "completed training"
    FAILED = "failed"
    LEFT = "left"  # exit code 0, but no completed training
    LATE = "late"  # did not join the cluster in time
    SILENT = "silent"  # gives no sign of life
    PREEMPTED = "was told to go, and has saved"  # whatever it ended with after that
    HUNG = "hung"  # and has said why
    STOPPED = "stopped"  # after the supervisor told it to


FAILURES = frozenset(set(Cause) - {Cause.COMPLETED, Cause.STOPPED})


@dataclass(frozen=True)
class Exit:
    """How one worker ended.

    Args:
        worker: Its name.
        cause: Why.
        returncode: As `subprocess` gives it; None for a worker that is late, or silent, and runs.
        at: `time.time()` when it was noticed.
        limit_secs: For a late or a silent worker, the time it had.
        why: What a worker has said itself; what the kernel says of a silent one.
    """

    worker: str
    cause: Cause
    returncode: int | None
    at: float
    limit_secs: float | None = None
    why: str = ""

    @property
    def exit_code(self) -> int:
        """What a shell would give: 128 + n for a signal. 124 for late or silent, 1 for left."""
        if self.returncode is None:
            return 124  # as timeout(1)
        if self.returncode < 0:
            return 128 - self.returncode
        return self.returncode or (1 if self.cause is Cause.LEFT else 0)

    @property
    def brief(self) -> str:
        """Without what the worker has said itself."""
        return str(self) if self.cause is not Cause.HUNG else f"{self.worker} hung"

    def __str__(self) -> str:
        if self.cause in (Cause.COMPLETED, Cause.PREEMPTED):
            return f"{self.worker} {self.cause.value}"
        if self.cause is Cause.LATE:
            return (
                f"{self.worker} has not joined the cluster within {self.limit_secs:g} s "
                "(--startup-timeout)"
            )
        if self.cause is Cause.SILENT:
            return (
                f"{self.worker} has given no sign of life for {self.limit_secs:g} s, its process: "
                f"{self.why} (--unresponsive-timeout)"
            )
        if self.cause is Cause.HUNG:
            return f"{self.worker} ended because training hung: {self.why}"
        if self.cause is Cause.LEFT:
            return f"{self.worker} left without completing training (exit code 0)"
        if self.returncode in (-signal.SIGTERM, -signal.SIGINT, -signal.SIGKILL):
            name = signal.Signals(-self.returncode).name
            if self.cause is Cause.STOPPED:
                return f"{self.worker} was ended by the supervisor ({name})"
            return f"{self.worker} was killed by {name}"
        if self.returncode is not None and self.returncode < 0:
            return f"{self.worker} was killed by {_signal_name(-self.returncode)}"
        if self.returncode == ExitCode.DO_NOT_RESTART:
            what = f"{self.worker} asked not to be started again (exit code 93)"
            return f"{what}: {self.why}" if self.why else what
        if self.returncode == ExitCode.PEER_LOST:
            return f"{self.worker} left because it lost another worker (exit code 201)"
        return f"{self.worker} exited with code {self.returncode}"


@dataclass(frozen=True)
class Limits:
    """How long the supervisor waits.

    Args:
        startup_secs: For every one of several workers to join the cluster.
        grace_secs: Between the user's own SIGTERM or SIGINT and SIGKILL.
        silence_secs: For a sign of life of a worker, which it gives each second while it can run
            Python.
    """

    startup_secs: float = 300.0
    grace_secs: float = 30.0  # that of Kubernetes, and of a PreemptionHandler
    silence_secs: float = 300.0

    def __post_init__(self) -> None:
        if not 0 < self.startup_secs < math.inf:
            raise ConfigurationError(
                f"The start-up time-out must be > 0 s, and finite. Received: {self.startup_secs:g}"
            )
        if not 0 <= self.grace_secs < math.inf:
            raise ConfigurationError(
                f"The grace period must be >= 0 s, and finite. Received: {self.grace_secs:g}"
            )
        if not 0 < self.silence_secs < math.inf:
            raise ConfigurationError(
                "The time-out for signs of life must be > 0 s, and finite. Received: "
                f"{self.silence_secs:g}"
            )


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    Args:
        exits: Every worker's end, the earliest first.
        interrupted_by: The signal to the supervisor that ended it, if one did.
        ended_at: `time.time()` when the last process was gone.
    """

    exits: tuple[Exit, ...]
    interrupted_by: signal.Signals | None
    ended_at: float

    @property
    def first_failure(self) -> Exit | None:
        """The earliest failure: what came later is its consequence. Who left because it was told to
        has failed least."""
        failures = [exit_ for exit_ in self.exits if exit_.cause in FAILURES]
        failures.sort(key=lambda exit_: exit_.cause is Cause.PREEMPTED)
        return failures[0] if failures else None

    @property
    def is_preempted(self) -> bool:
        """Whether they left because they were told to, which is no failure of theirs."""
        return self.first_failure is not None and self.first_failure.cause is Cause.PREEMPTED


@dataclass(frozen=True)
class Listener:
    """What to call while an attempt runs.

    Args:
        on_failure: With the failures found, earliest first, once all others were told to stop.
        on_training: With the last reports, once every worker has trained its first batch.
    """

    on_failure: Callable[[Sequence[Exit]], None]
    on_training: Callable[[Mapping[str, Status]], None] | None = None


def run_attempt(
    group: Group,
    workers: Sequence[str],
    contract: Supervised,
    limits: Limits,
    listener: Listener,
) -> Outcome:
    """Waits until all workers have completed training, or one has failed and all are ended.

    Args:
        group: The workers, which have been started.
        workers: Their names.
        contract: Where the workers report.
        limits: How long to wait.
        listener: Hears what happens meanwhile.
    """
    # A single worker has no cluster to join, and may prepare its data for as long as it likes.
    deadline = time.monotonic() + limits.startup_secs if len(workers) > 1 else None
    pulses = Pulses(contract, workers, limits.silence_secs)
    on_training = listener.on_training
    cause_by = math.inf
    exits: list[Exit] = []
    while group.running:
        due = min(cause_by, math.inf if deadline is None else deadline)
        timeout = min(max(0.0, due - time.monotonic()), pulses.look_every_secs)
        if on_training:
            timeout = min(timeout, _STATUS_POLL_SECS)
        happened = group.wait(timeout)
        exits += [judge(ended, contract.read(ended.worker)) for ended in happened.ended]
        if happened.signals:
            number = happened.signals[0]
            # Asked twice within one turn of the loop is asked twice.
            grace = limits.grace_secs if len(happened.signals) == 1 else 0.0
            group.signal(number)
            rest, _ = await_end(group, grace, hurry=True)
            return _outcome(exits + [_stopped(ended) for ended in rest], number)
        if on_training and (reports := _all_training(contract, workers)):
            on_training(reports)
            on_training = None
        if deadline is not None and time.monotonic() >= deadline:
            exits += _late(contract, workers, exits, limits.startup_secs)
            deadline = None
        gone = {exit_.worker for exit_ in exits}
        exits += [
            Exit(found.worker, Cause.SILENT, None, time.time(), limits.silence_secs, found.state)
            for found in pulses.look()
            if found.worker not in gone
        ]
        exits.sort(key=earliest_first)
        failures = [exit_ for exit_ in exits if exit_.cause in FAILURES]
        if failures and all(each.cause is Cause.PREEMPTED for each in failures):
            # All workers have agreed to go.
            listener.on_failure(failures)
            ended, signals = await_end(group, limits.grace_secs, hurry=True)
            exits += [judge(one, contract.read(one.worker)) for one in ended]
            return _outcome(exits, signals[0] if signals else None)
        if failures and all(each.returncode == ExitCode.PEER_LOST for each in failures):
            cause_by = min(cause_by, time.monotonic() + _CAUSE_SECS)
            if group.running and time.monotonic() < cause_by:
                continue
        if failures:
            return _end_after(failures, exits, group, listener)
    group.kill()  # what the commands have left behind
    group.drain()
    return _outcome(exits, None)


def judge(ended: Ended, status: Status | None) -> Exit:
    """Says why a worker has ended that nobody told to."""
    phase, why = (None, "") if status is None else (status.phase, status.why)
    code = ended.returncode
    if phase is Phase.PREEMPTED and (code == ExitCode.PREEMPTED or code < 0):
        cause = Cause.PREEMPTED
    elif phase is Phase.HUNG and code == ExitCode.HUNG:
        cause = Cause.HUNG
    elif code != 0:
        cause = Cause.FAILED
    elif phase is not Phase.COMPLETED:
        cause = Cause.LEFT
    else:
        cause = Cause.COMPLETED
    return Exit(ended.worker, cause, code, ended.at, why=why)


def await_end(
    group: Group, grace_secs: float, hurry: bool
) -> tuple[list[Ended], list[signal.Signals]]:
    """Waits until all workers have ended that were told to; SIGKILL after the grace period.

    Args:
        group: The workers.
        grace_secs: How long they have.
        hurry: Whether a signal to the supervisor cuts the grace short.

    Returns:
        The workers' ends, and the signals that came meanwhile.
    """
    ended: list[Ended] = []
    signals: list[signal.Signals] = []
    deadline = time.monotonic() + grace_secs
    # A shell dies of SIGTERM at once, while the training that it started may still be saving.
    while group.living and (remaining := deadline - time.monotonic()) > 0:
        happened = group.wait(remaining)
        ended += happened.ended
        signals += happened.signals
        if hurry and happened.signals:
            break
    ended += group.kill()
    group.drain()
    return ended, signals


def _end_after(
    failures: list[Exit], exits: list[Exit], group: Group, listener: Listener
) -> Outcome:
    group.signal(signal.SIGTERM)
    group.drain()  # last words stand before the report
    listener.on_failure(failures)
    ended, signals = await_end(group, PEER_GRACE_SECS, hurry=False)
    told = {exit_.worker for exit_ in exits}  # one that is late or silent is ended by this
    rest = [_stopped(one) for one in ended if one.worker not in told]
    return _outcome(exits + rest, signals[0] if signals else None)


def _outcome(exits: Sequence[Exit], interrupted_by: signal.Signals | None) -> Outcome:
    return Outcome(tuple(exits), interrupted_by, time.time())


def _stopped(ended: Ended) -> Exit:
    return Exit(ended.worker, Cause.STOPPED, ended.returncode, ended.at)


def earliest_first(exit_: Exit) -> tuple[bool, float, bool]:
    """Sorts exits by when they came.

    Several may be found in one look, in no order. A worker that a signal killed is then the likely
    cause; one that raised, or let TensorFlow abort, may do so for its lost peer. One that says that
    it does is never the cause.
    """
    killed = exit_.returncode is not None and exit_.returncode < 0
    is_consequence = exit_.returncode == ExitCode.PEER_LOST
    return is_consequence, exit_.at, not killed or exit_.returncode == -signal.SIGABRT


def _late(
    contract: Supervised, workers: Sequence[str], exits: Sequence[Exit], limit_secs: float
) -> list[Exit]:
    gone = {exit_.worker for exit_ in exits}
    return [
        Exit(worker, Cause.LATE, None, time.time(), limit_secs)
        for worker in workers
        if worker not in gone and contract.read(worker) is None
    ]


def _all_training(contract: Supervised, workers: Sequence[str]) -> dict[str, Status] | None:
    reports: dict[str, Status] = {}
    for worker in workers:
        status = contract.read(worker)
        if status is None or Phase.TRAINING not in status.since:
            return None
        reports[worker] = status
    return reports


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
