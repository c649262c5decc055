"""Decides if and when a job is restarted, and with which workers. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.exit_codes import ExitCode
from keras_distplug.supervisor.attempt import Outcome
from keras_distplug.supervisor.exits import Cause
from keras_distplug.supervisor.replacing import is_newer, pause_secs

_LONGEST_PAUSE_SECS = 60.0
_MAX_SAME_FAILURES = 2  # consecutive failures of a worker until the others continue without it

# Exit codes that are final, even if other workers have failed as well.
_FINAL = {
    ExitCode.INTERRUPTED: "the user pressed Ctrl-C",
    ExitCode.DO_NOT_RESTART: "it would fail in the same way",
}


@dataclass(frozen=True)
class Budgets:
    """Limits on the restarts of a job.

    Args:
        failures: Number of restarts after failures. Defaults to 10.
        preemptions: Number of restarts after preemptions with a checkpoint. Defaults to 100.
        without_progress: Number of consecutive attempts, with the same workers, without a newer
            checkpoint after which the job ends, whatever the other limits. Defaults to 3.
        replacements: Number of restarts of single workers, with parameter servers, without a newer
            checkpoint. Defaults to 100.
        min_workers: Number of workers with which the job may continue if a worker keeps failing.
            Defaults to None: all workers are required.

    Raises:
        ConfigurationError: If a limit is too small.
    """

    failures: int = 10
    preemptions: int = 100
    without_progress: int = 3
    replacements: int = 100
    min_workers: int | None = None

    def __post_init__(self) -> None:
        for option, value, least in (
            ("--max-restarts", self.failures, 0),
            ("--max-preemptions", self.preemptions, 0),
            ("--max-without-progress", self.without_progress, 1),
            ("--max-worker-restarts", self.replacements, 0),
            ("--min-workers", self.min_workers, 1),
        ):
            if value is not None and value < least:
                raise ConfigurationError(f"{option} must be >= {least}. Received: {value}")


@dataclass(frozen=True)
class Attempt:
    """A finished attempt.

    Args:
        slots: Slots of the job that the workers occupied, in order.
        outcome: Outcome of the attempt.
        saves: Step of its newest checkpoint, for every run.
    """

    slots: tuple[int, ...]
    outcome: Outcome
    saves: Mapping[str, int]


@dataclass(frozen=True)
class Again:
    """A decision to restart the job.

    Args:
        slots: Slots of the workers.
        pause_secs: Delay before the restart, in seconds. Defaults to 0.
        was_preempted: True if the restart follows a preemption, not a failure. Defaults to False.
        given_up: Slot of a worker that is dropped from now on. Defaults to None.
    """

    slots: tuple[int, ...]
    pause_secs: float = 0.0
    was_preempted: bool = False
    given_up: int | None = None


@dataclass(frozen=True)
class End:
    """A decision to end the job.

    Args:
        code: Exit code of the job.
        why: Readable reason. Defaults to none, if the job is complete.
    """

    code: int
    why: str = ""


def decide(history: Sequence[Attempt], budgets: Budgets) -> Again | End:
    """Decides what to do after an attempt.

    Args:
        history: All attempts, in order.
        budgets: Limits on restarts.
    """
    last = history[-1]
    outcome, failure = last.outcome, last.outcome.first_failure
    if outcome.interrupted_by is not None:
        name = outcome.interrupted_by.name
        return End(128 + outcome.interrupted_by, f"stopped by {name} to the supervisor")
    if failure is None:
        return End(0)
    if (final := _final(outcome)) is not None:
        return End(final, f"not restarted: {_FINAL[final]}")
    if (given_up := outcome.given_up) is not None:
        return End(failure.exit_code if given_up.code is None else given_up.code, given_up.why)
    preemptions = sum(each.outcome.is_preempted for each in history)
    failures = len(history) - preemptions
    if preemptions > budgets.preemptions:
        return End(failure.exit_code, f"preempted {preemptions} times (--max-preemptions)")
    if failures > budgets.failures:
        return End(failure.exit_code, f"gave up after {counted(failures - 1, 'restart')}")
    if outcome.is_preempted:
        return Again(last.slots, was_preempted=True)
    if (slot := _find_failing_slot(history, budgets)) is not None:
        return Again(tuple(each for each in last.slots if each != slot), given_up=slot)
    fruitless = _without_progress(history)
    if fruitless >= budgets.without_progress:
        return End(
            ExitCode.DO_NOT_RESTART,
            f"gave up: {counted(fruitless, 'consecutive attempt')} without a newer checkpoint "
            "(--max-without-progress)",
        )
    return Again(last.slots, pause_secs(fruitless, _LONGEST_PAUSE_SECS))


def _final(outcome: Outcome) -> ExitCode | None:
    codes = {exit_.exit_code for exit_ in outcome.exits}
    return next((code for code in _FINAL if code in codes), None)


def _without_progress(history: Sequence[Attempt]) -> int:
    """Returns the number of consecutive failed attempts without a newer checkpoint.

    Only attempts with the last one's workers count, and preempted attempts do not.
    """
    newest: dict[str, int] = {}
    fruitless, slots = 0, history[0].slots
    for attempt in history:
        has_progress = is_newer(attempt.saves, newest)
        newest |= {run: max(step, newest.get(run, step)) for run, step in attempt.saves.items()}
        if has_progress or attempt.slots != slots:
            fruitless, slots = 0, attempt.slots
        if not has_progress and not attempt.outcome.is_preempted:
            fruitless += 1
    return fruitless


def _find_failing_slot(history: Sequence[Attempt], budgets: Budgets) -> int | None:
    """Returns the slot of a worker that keeps failing, if the others may continue without it."""
    last = history[-_MAX_SAME_FAILURES:]
    slots = last[-1].slots
    is_enough = budgets.min_workers is not None and len(slots) > budgets.min_workers
    if not is_enough or len(last) < _MAX_SAME_FAILURES or any(each.slots != slots for each in last):
        return None
    failing = {_failing_slot(each) for each in last}
    return failing.pop() if len(failing) == 1 else None


def _failing_slot(attempt: Attempt) -> int | None:
    failure = attempt.outcome.first_failure
    if failure is None or attempt.outcome.is_preempted:
        return None
    worker = failure.worker
    if failure.returncode == ExitCode.PEER_LOST:
        # The survivors exited before the worker they lost: it hangs, or exits slowly. It is the
        # cause if it is the only one that the supervisor stopped.
        stopped = [each.worker for each in attempt.outcome.exits if each.cause is Cause.STOPPED]
        if len(stopped) != 1:
            return None
        [worker] = stopped
    return attempt.slots[int(worker.rpartition("-")[2])]


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: `"1 worker"`, `"2 workers"`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
