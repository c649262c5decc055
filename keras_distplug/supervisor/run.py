"""`keras-distplug run`: attempts until the job is done or the restarts are used up."""

from __future__ import annotations

import shlex
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.exit_codes import ExitCode
from keras_distplug.core.supervised import Phase, Status, Supervised
from keras_distplug.core.timeouts import Timeouts
from keras_distplug.supervisor.attempt import (
    FAILURES,
    Cause,
    Exit,
    Limits,
    Listener,
    Outcome,
    run_attempt,
)
from keras_distplug.supervisor.group import Group
from keras_distplug.supervisor.guard import Guard
from keras_distplug.supervisor.launch import (
    check_command,
    divide_gpus,
    free_ports,
    local_cluster,
    refuse_foreign_cluster,
    visible_gpus,
    worker_environment,
)
from keras_distplug.supervisor.output import Output
from keras_distplug.supervisor.signals import Interruptions

# What a worker's exit code tells, whatever else has failed beside it.
_FINAL = {
    ExitCode.INTERRUPTED: "it was the user's ctrl-C",
    ExitCode.DO_NOT_RESTART: "it would fail in the same way",
}


@dataclass(frozen=True)
class Job:
    """What to run and how often to try.

    Args:
        command: What every worker runs.
        workers: How many.
        devices_per_worker: Devices for each; None for equal shares of the GPUs.
        max_restarts: How often a failed group is started again.
        limits: How long to wait.
        timeouts: Of the workers' cluster.
    """

    command: tuple[str, ...]
    workers: int
    devices_per_worker: int | None = None
    max_restarts: int = 3
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigurationError(
                "There is no command to run. Write it after `--`: "
                "keras-distplug run --workers 2 -- python train.py"
            )
        if self.workers < 1:
            raise ConfigurationError(f"--workers must be >= 1. Received: {self.workers}")
        if self.devices_per_worker is not None and self.devices_per_worker < 1:
            raise ConfigurationError(
                f"--devices-per-worker must be >= 1. Received: {self.devices_per_worker}"
            )
        if self.max_restarts < 0:
            raise ConfigurationError(f"--max-restarts must be >= 0. Received: {self.max_restarts}")


def run(job: Job, environ: Mapping[str, str]) -> int:
    """Runs a job on this machine until it is done.

    Args:
        job: What to run.
        environ: What the workers' environments are made from, usually `os.environ`.

    Returns:
        The exit code: 0 once every worker has completed training; 128 + n when signal n ended the
        supervisor; 130 or 93 when a worker has left with it, which is never started again;
        otherwise that of the first failure of the last attempt.
    """
    refuse_foreign_cluster(environ)
    check_command(job.command, environ)
    gpus = divide_gpus(visible_gpus(environ), job.workers, job.devices_per_worker)
    names = [role.name for role in local_cluster(range(job.workers))]
    name_of_job, begun = uuid.uuid4().hex, time.monotonic()
    history: list[Outcome] = []
    ports: tuple[int, ...] = ()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="keras-distplug-")))
        interruptions = stack.enter_context(Interruptions())
        stack.enter_context(Guard(name_of_job, folder))
        output = stack.enter_context(Output(names, live_worker=names[0]))
        output.note(f"starting {_count(job.workers, 'worker')}: {shlex.join(job.command)}")
        while True:
            attempt = len(history)
            contract = Supervised(
                name_of_job, attempt, folder / f"attempt-{attempt}", job.devices_per_worker
            )
            contract.status_dir.mkdir(parents=True)  # something may have tidied up
            ports = free_ports(job.workers, avoid=ports)
            environments = {
                role.name: worker_environment(
                    {**environ, **job.timeouts.to_env()},
                    role,
                    contract,
                    gpus[role.index] if gpus else None,
                )
                for role in local_cluster(ports)
            }
            listener = Listener(
                on_failure=partial(_note_failure, output, job.workers),
                on_training=partial(_note_recovery, output, history[-1]) if history else None,
            )
            with Group(name_of_job, output, interruptions) as group:
                outcome = run_attempt(
                    group, job.command, environments, contract, job.limits, listener
                )
            history.append(outcome)
            verdict = _verdict(job, history)
            if verdict is not None:
                for line in closing_report(job, history, time.monotonic() - begun):
                    output.note(line)
                return verdict
            failures = sum(not each.is_preempted for each in history)
            output.note(
                "starting again"
                if outcome.is_preempted
                else f"restart {failures} of {job.max_restarts}"
            )


def _verdict(job: Job, history: Sequence[Outcome]) -> int | None:
    """The exit code, or None to try again."""
    last = history[-1]
    if last.interrupted_by is not None:
        return 128 + last.interrupted_by
    if last.first_failure is None:
        return 0
    if (final := _final(last)) is not None:
        return final
    failures = [each for each in history if not each.is_preempted]
    if last.is_preempted or len(failures) <= job.max_restarts:
        return None
    return last.first_failure.exit_code


def _final(outcome: Outcome) -> ExitCode | None:
    codes = {exit_.exit_code for exit_ in outcome.exits}
    return next((code for code in _FINAL if code in codes), None)


def closing_report(job: Job, history: Sequence[Outcome], elapsed_secs: float) -> list[str]:
    """The last lines of a job: what happened, the earliest cause first."""
    last = history[-1]
    restarts = _count(sum(not each.is_preempted for each in history[:-1]), "restart")
    if last.interrupted_by is not None:
        ends = "; ".join(str(exit_) for exit_ in last.exits)
        return [f"ended by {last.interrupted_by.name} to the supervisor: {ends}"]
    failure = last.first_failure
    if failure is None:
        everyone = _count(job.workers, "worker")
        return [f"{everyone} completed training in {elapsed_secs:.1f} s, {restarts}"]
    if (final := _final(last)) is not None:
        lines = [f"not started again, for {_FINAL[final]}; exit code {final:d}"]
    else:
        lines = [f"gave up after {restarts}; exit code {failure.exit_code}"]
    lines.append(f"first failure: {_dated(failure)}")
    for exit_ in last.exits:
        if exit_ is not failure:
            lines.append(f"  then: {_consequence(exit_, failure)}")
    for number, outcome in enumerate(history[:-1]):
        if outcome.first_failure:
            lines.append(f"  in attempt {number} before: {_dated(outcome.first_failure)}")
    return lines


def recovery_report(before: Outcome, reports: Mapping[str, Status]) -> str:
    """From a failure until every worker trains again, and where the time went."""
    failure = before.first_failure
    assert failure is not None
    parts = [f"stop {before.ended_at - failure.at:.1f} s"]
    reached = before.ended_at
    for phase, what in (
        (Phase.JOINED, "import and join"),
        (Phase.FITTING, "build and restore"),
        (Phase.TRAINING, "first step"),
    ):
        moments = [status.since[phase] for status in reports.values() if phase in status.since]
        if moments:  # a script may skip a phase; its time then counts for the next
            parts.append(f"{what} {max(moments) - reached:.1f} s")
            reached = max(moments)
    return f"training again {reached - failure.at:.1f} s after {failure.brief}: {', '.join(parts)}"


def _note_failure(output: Output, workers: int, failures: Sequence[Exit]) -> None:
    told = all(failure.cause is Cause.PREEMPTED for failure in failures)
    stopping = "; stopping all workers" if workers > 1 and not told else ""
    output.note("; ".join(str(failure) for failure in failures) + stopping)


def _note_recovery(output: Output, before: Outcome, reports: Mapping[str, Status]) -> None:
    output.note(recovery_report(before, reports))


def _consequence(exit_: Exit, failure: Exit) -> str:
    if exit_.cause is Cause.STOPPED or exit_.cause in FAILURES:
        return f"{exit_}, {max(0.0, exit_.at - failure.at):.1f} s after"
    return str(exit_)


def _dated(exit_: Exit) -> str:
    return f"{exit_} at {time.strftime('%H:%M:%S', time.localtime(exit_.at))}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
