"""How one worker ended, and why, as a value."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass

from keras_distplug.core.exit_codes import ExitCode
from keras_distplug.core.supervised import Phase, Status
from keras_distplug.supervisor.group import Ended


class Cause(enum.Enum):
    """Why a worker has ended."""

    COMPLETED = "completed training"
    UNTRAINED = "ended"  # with exit code 0, and none of our `fit`s ran
    FAILED = "failed"
    LEFT = "left"  # exit code 0, but no completed training
    LATE = "late"  # did not join the cluster in time
    SILENT = "silent"  # gives no sign of life
    PREEMPTED = "was told to go, and has saved"  # whatever it ended with after that
    HUNG = "hung"  # and has said why
    STOPPED = "stopped"  # after the supervisor told it to


SUCCESSES = frozenset((Cause.COMPLETED, Cause.UNTRAINED))
FAILURES = frozenset(set(Cause) - SUCCESSES - {Cause.STOPPED})


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
        if self.cause is Cause.UNTRAINED:
            return f"{self.worker} ended with exit code 0 without training"
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
            why = self.why or "without completing training"
            return f"{self.worker} left {why} (exit code 0)"
        if self.returncode is not None and self.returncode < 0:
            name = _signal_name(-self.returncode)
            if self.cause is Cause.STOPPED and name in ("SIGTERM", "SIGINT", "SIGKILL"):
                return f"{self.worker} was ended by the supervisor ({name})"
            return f"{self.worker} was killed by {name}"
        if self.returncode == ExitCode.DO_NOT_RESTART:
            what = f"{self.worker} asked not to be started again (exit code 93)"
            return f"{what}: {self.why}" if self.why else what
        if self.returncode == ExitCode.PEER_LOST:
            return f"{self.worker} left because it lost another worker (exit code 201)"
        return f"{self.worker} exited with code {self.returncode}"


def judge(ended: Ended, status: Status | None, *, serves: bool = False) -> Exit:
    """Says why a worker has ended that nobody told to.

    Args:
        ended: Its end.
        status: Its last report.
        serves: Whether it trains nothing itself: such a one is told when to end.
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
    """Of one that was told to end."""
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


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
