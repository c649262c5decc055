"""The exit of a worker and its cause."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass

from keras_distplug.core.exit_codes import ExitCode
from keras_distplug.core.supervised import Phase, Status
from keras_distplug.supervisor.group import Ended


class Cause(enum.Enum):
    """The cause of a worker's exit."""

    COMPLETED = "completed training"
    UNTRAINED = "ended"  # exit code 0, without a `fit` with callbacks of this package
    FAILED = "failed"
    LEFT = "left"  # exit code 0 before training was complete
    LATE = "late"  # did not join the cluster in time
    SILENT = "silent"  # gives no sign of life
    PREEMPTED = "was preempted after saving a checkpoint"  # whatever its exit code
    HUNG = "hung"  # and has reported the reason
    STOPPED = "stopped"  # by the supervisor


SUCCESSES = frozenset((Cause.COMPLETED, Cause.UNTRAINED))
FAILURES = frozenset(set(Cause) - SUCCESSES - {Cause.STOPPED})


@dataclass(frozen=True)
class Exit:
    """The exit of a worker, or its failure while it is running.

    Args:
        worker: Name of the worker.
        cause: Cause of the exit.
        returncode: Return code, as in `subprocess`; None for a late or silent worker that is still
            running.
        at: Time at which it was noticed, in seconds since 1970.
        limit_secs: Time limit of a late or silent worker, in seconds. Defaults to None.
        why: Reason reported by the worker; for a silent one, its process state. Defaults to none.
    """

    worker: str
    cause: Cause
    returncode: int | None
    at: float
    limit_secs: float | None = None
    why: str = ""

    @property
    def exit_code(self) -> int:
        """The exit code in a shell: 128 + n for signal n, 124 for late or silent, 1 for left."""
        if self.returncode is None:
            return 124  # as timeout(1)
        if self.returncode < 0:
            return 128 - self.returncode
        return self.returncode or (1 if self.cause is Cause.LEFT else 0)

    @property
    def brief(self) -> str:
        """A description without the worker's own reason."""
        return str(self) if self.cause is not Cause.HUNG else f"{self.worker} hung"

    def __str__(self) -> str:
        if self.cause in (Cause.COMPLETED, Cause.PREEMPTED):
            return f"{self.worker} {self.cause.value}"
        if self.cause is Cause.UNTRAINED:
            return f"{self.worker} exited with code 0 without training"
        if self.cause is Cause.LATE:
            return (
                f"{self.worker} has not joined the cluster within {self.limit_secs:g} s "
                "(--startup-timeout)"
            )
        if self.cause is Cause.SILENT:
            return (
                f"{self.worker} has given no sign of life for {self.limit_secs:g} s; process state "
                f"{self.why} (--unresponsive-timeout)"
            )
        if self.cause is Cause.HUNG:
            return f"{self.worker} exited because training hung: {self.why}"
        if self.cause is Cause.LEFT:
            why = self.why or "without completing training"
            return f"{self.worker} exited {why} (exit code 0)"
        if self.returncode is not None and self.returncode < 0:
            name = _signal_name(-self.returncode)
            if self.cause is Cause.STOPPED and name in ("SIGTERM", "SIGINT", "SIGKILL"):
                return f"{self.worker} was stopped by the supervisor ({name})"
            return f"{self.worker} was killed by {name}"
        if self.returncode == ExitCode.DO_NOT_RESTART:
            what = f"{self.worker} asked not to be restarted (exit code 93)"
            return f"{what}: {self.why}" if self.why else what
        if self.returncode == ExitCode.PEER_LOST:
            return f"{self.worker} exited because it lost another worker (exit code 201)"
        return f"{self.worker} exited with code {self.returncode}"


def judge(ended: Ended, status: Status | None, *, serves: bool = False) -> Exit:
    """Determines why a worker has exited that the supervisor did not stop.

    Args:
        ended: End of its process.
        status: Last report of the worker; None without one.
        serves: True if it only serves others: such a worker should run until it is stopped.
            Defaults to False.
    """
    phase, why = (None, "") if status is None else (status.phase, status.why)
    code = ended.returncode
    if phase is Phase.PREEMPTED and (code == ExitCode.PREEMPTED or code < 0):
        cause = Cause.PREEMPTED
    elif phase is Phase.HUNG and code == ExitCode.HUNG:
        cause = Cause.HUNG
    elif code != 0:
        cause = Cause.FAILED
    elif serves:
        cause, why = Cause.LEFT, "while the chief needed it"
    elif phase in (None, Phase.JOINED):
        cause = Cause.UNTRAINED
    elif phase is not Phase.COMPLETED:
        cause = Cause.LEFT
    else:
        cause = Cause.COMPLETED
    return Exit(ended.worker, cause, code, ended.at, why=why)


def stopped(ended: Ended) -> Exit:
    """Returns the exit of a worker that the supervisor stopped."""
    return Exit(ended.worker, Cause.STOPPED, ended.returncode, ended.at)


def earliest_first(exit_: Exit) -> tuple[bool, float, bool]:
    """Sort key for exits, by time.

    Several exits may be noticed at the same time, in unknown order. A worker killed by a signal is
    then the likely cause; one that raised an error, or was aborted by TensorFlow, may have done so
    because of its lost peer. A worker that exited because of a lost peer is never the cause.
    """
    killed = exit_.returncode is not None and exit_.returncode < 0
    is_consequence = exit_.returncode == ExitCode.PEER_LOST
    return is_consequence, exit_.at, not killed or exit_.returncode == -signal.SIGABRT


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
