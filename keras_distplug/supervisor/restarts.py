"""Whether a job is started again, when, and with which workers. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.exit_codes import ExitCode
from keras_distplug.supervisor.attempt import Outcome
from keras_distplug.supervisor.exits import Cause
from keras_distplug.supervisor.replacing import is_newer, pause_secs

_LONGEST_PAUSE_SECS = 60.0
_AGAIN = 2  # failures of the same worker, one after the other, until the others go on without it

# What a worker's exit code tells, whatever else has failed beside it.
_FINAL = {
    ExitCode.INTERRUPTED: "it was the user's ctrl-C",
    ExitCode.DO_NOT_RESTART: "it would fail in the same way",
}


@dataclass(frozen=True)
class Budgets:
    """How often a job is started again.

    Args:
        failures: After a failure.
        preemptions: After its workers were told to go, and have saved.
        without_progress: So many attempts in a row, with the same workers, that made no newer
            checkpoint than there was are the end, whatever is left of the other budgets.
        replacements: Of workers beside parameter servers, each alone, until there is a newer
            checkpoint.
        min_workers: With how many workers it may go on, where one fails again and again. None: not
            with fewer than there were.
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
    """One attempt that is over.

    Args:
        slots: Which of the job's places the workers had, in their order.
        outcome: How it ended.
        saves: The step of the newest checkpoint that it made, for each run.
    """

    slots: tuple[int, ...]
    outcome: Outcome
    saves: Mapping[str, int]


@dataclass(frozen=True)
class Again:
    """Start the job again.

    Args:
        slots: Of the workers.
        pause_secs: How long to wait before.
        was_preempted: Whether that is no failure.
        given_up: The place of a worker that is left out from now on, if one is.
    """

    slots: tuple[int, ...]
    pause_secs: float = 0.0
    was_preempted: bool = False
    given_up: int | None = None


@dataclass(frozen=True)
class End:
    """Do not.

    Args:
        code: The job's exit code.
        why: For people; empty when it is done.
    """

    code: int
    why: str = ""


def decide(history: Sequence[Attempt], budgets: Budgets) -> Again | End:
    """What comes after an attempt.

    Args:
        history: All attempts, the last one last.
        budgets: How often to try.
    """
    last = history[-1]
    outcome, failure = last.outcome, last.outcome.first_failure
    if outcome.interrupted_by is not None:
        name = outcome.interrupted_by.name
        return End(128 + outcome.interrupted_by, f"ended by {name} to the supervisor")
    if failure is None:
        return End(0)
    if (final := _final(outcome)) is not None:
        return End(final, f"not started again, for {_FINAL[final]}")
    if (given_up := outcome.given_up) is not None:
        return End(failure.exit_code if given_up.code is None else given_up.code, given_up.why)
    preemptions = sum(each.outcome.is_preempted for each in history)
    failures = len(history) - preemptions
    if preemptions > budgets.preemptions:
        return End(failure.exit_code, f"told to go {preemptions} times (--max-preemptions)")
    if failures > budgets.failures:
        return End(failure.exit_code, f"gave up after {counted(failures - 1, 'restart')}")
    if outcome.is_preempted:
        return Again(last.slots, was_preempted=True)
    if (slot := _who_fails_again(history, budgets)) is not None:
        return Again(tuple(each for each in last.slots if each != slot), given_up=slot)
    fruitless = _without_progress(history)
    if fruitless >= budgets.without_progress:
        return End(
            ExitCode.DO_NOT_RESTART,
            f"gave up: {counted(fruitless, 'attempt')} in a row made no newer checkpoint "
            "(--max-without-progress)",
        )
    return Again(last.slots, pause_secs(fruitless, _LONGEST_PAUSE_SECS))


def _final(outcome: Outcome) -> ExitCode | None:
    codes = {exit_.exit_code for exit_ in outcome.exits}
    return next((code for code in _FINAL if code in codes), None)


def _without_progress(history: Sequence[Attempt]) -> int:
    """Failed attempts in a row, with the workers of the last one, that made no newer checkpoint.
    Those whose workers were told to go do not count."""
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


def _who_fails_again(history: Sequence[Attempt], budgets: Budgets) -> int | None:
    """The place of a worker that the others can do without."""
    last = history[-_AGAIN:]
    slots = last[-1].slots
    is_enough = budgets.min_workers is not None and len(slots) > budgets.min_workers
    if not is_enough or len(last) < _AGAIN or any(each.slots != slots for each in last):
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
        # cause if it is the only one that the supervisor had to stop.
        stopped = [each.worker for each in attempt.outcome.exits if each.cause is Cause.STOPPED]
        if len(stopped) != 1:
            return None
        [worker] = stopped
    return attempt.slots[int(worker.rpartition("-")[2])]


def counted(number: int, noun: str) -> str:
    """`"1 worker"`, `"2 workers"`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
