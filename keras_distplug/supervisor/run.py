"""`keras-distplug run`: restarts a job until it is complete or its restarts are used up."""

from __future__ import annotations

import select
import shlex
import signal
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from keras_distplug.core import events
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.events import Ended, Failed, Started, StartedAgain, Training
from keras_distplug.core.supervised import Phase, Status, Supervised
from keras_distplug.core.timeouts import Timeouts
from keras_distplug.supervisor.attempt import Limits, Listener, Outcome, Running
from keras_distplug.supervisor.event_log import EventLog, OpenLog
from keras_distplug.supervisor.exits import Cause, Exit
from keras_distplug.supervisor.fork_server import ForkServer
from keras_distplug.supervisor.group import Group
from keras_distplug.supervisor.guard import Guard
from keras_distplug.supervisor.launch import (
    check_command,
    common_environment,
    divide_gpus,
    free_ports,
    local_cluster,
    refuse_foreign_cluster,
    visible_gpus,
    worker_environment,
)
from keras_distplug.supervisor.members import Members
from keras_distplug.supervisor.output import Output
from keras_distplug.supervisor.replacing import Replaced
from keras_distplug.supervisor.restarts import Again, Attempt, Budgets, End, counted, decide
from keras_distplug.supervisor.signals import Interruptions


@dataclass(frozen=True)
class Job:
    """The command to run, its workers, and its limits.

    Args:
        command: Command of every worker.
        workers: Number of workers.
        ps: Number of parameter servers; with any, the workers serve a chief. Defaults to 0.
        devices_per_worker: Number of devices per worker. Defaults to None: equal shares of the
            GPUs.
        budgets: Limits on restarts. Defaults to `Budgets()`.
        fork_server: True to fork workers from a process that has imported TensorFlow and Keras,
            once it is ready. Defaults to True.
        limits: Time limits. Defaults to `Limits()`.
        timeouts: Timeouts of the workers' cluster. Defaults to `Timeouts()`.
        log: File that events are appended to. Defaults to None, no file.

    Raises:
        ConfigurationError: If an argument is invalid.
    """

    command: tuple[str, ...]
    workers: int
    ps: int = 0
    devices_per_worker: int | None = None
    budgets: Budgets = field(default_factory=Budgets)
    fork_server: bool = True
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    log: Path | None = None

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigurationError(
                "Expected a command to run. Received: none. Write it after `--`: "
                "keras-distplug run --workers 2 -- python train.py"
            )
        if self.workers < 1:
            raise ConfigurationError(f"--workers must be >= 1. Received: {self.workers}")
        if self.ps < 0:
            raise ConfigurationError(f"--ps must be >= 0. Received: {self.ps}")
        if self.devices_per_worker is not None and self.devices_per_worker < 1:
            raise ConfigurationError(
                f"--devices-per-worker must be >= 1. Received: {self.devices_per_worker}"
            )
        least = self.budgets.min_workers
        if least is not None and self.ps:
            raise ConfigurationError(
                "Expected --min-workers only without parameter servers (--ps). With them, a "
                "worker that fails is restarted on its own, and the others continue meanwhile: "
                "omit --min-workers, and use --max-worker-restarts to limit these restarts."
            )
        if least is not None and least > self.workers:
            raise ConfigurationError(
                f"--min-workers must be <= --workers ({self.workers}). Received: {least}"
            )

    @property
    def others(self) -> int:
        """The number of processes other than workers: parameter servers and their chief."""
        return 1 + self.ps if self.ps else 0


def run(job: Job, environ: Mapping[str, str], open_log: OpenLog | None = None) -> int:
    """Runs a job on this machine until it is complete.

    Args:
        job: The job.
        environ: Base of the workers' environments, usually `os.environ`.
        open_log: Function that opens a file in the log of the workers' run. Defaults to None, no
            such file.

    Returns:
        The exit code: 0 if all workers, or the chief that they serve, completed training; 128 + n
        if signal n stopped the supervisor; 130 or 93 if a worker exited with it, after which the
        job is not restarted; 93 after too many attempts without progress; otherwise the code of the
        first failure in the last attempt.

    Raises:
        ConfigurationError: If the job cannot be started in this environment.
        SupervisorError: If a worker cannot be killed.
    """
    refuse_foreign_cluster(environ)
    check_command(job.command, environ)
    gpus = divide_gpus(visible_gpus(environ), job.workers, job.devices_per_worker)
    names = [role.name for role in local_cluster(range(job.workers + job.others), job.ps)]
    job_name, started_s = uuid.uuid4().hex, time.monotonic()
    with ExitStack() as stack:
        log = stack.enter_context(EventLog(job.log, job_name, open_log))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="keras-distplug-")))
        interruptions = stack.enter_context(Interruptions())
        stack.enter_context(Guard(job_name, folder))
        common = common_environment({**environ, **job.timeouts.to_env()})
        fork_server = stack.enter_context(
            ForkServer(
                job.command,
                common,
                job_name,
                folder,
                is_on=job.fork_server,
                # CUDA does not survive a fork, and importing TensorFlow may initialize it.
                why_not="the workers use GPUs" if gpus else "",
            )
        )
        output = stack.enter_context(Output(names))
        output.note(f"starting {_describe(job)}: {shlex.join(job.command)}")
        history: list[Attempt] = []
        slots, ports = tuple(range(job.workers)), tuple[int, ...]()
        while True:
            contract = Supervised(
                job_name,
                len(history),
                folder / f"attempt-{len(history)}",
                job.devices_per_worker,
            )
            contract.status_dir.mkdir(parents=True)  # the parent may have been cleaned up
            log.ask(contract.logs)
            ports = free_ports(len(slots) + job.others, avoid=ports)
            roles = local_cluster(ports, job.ps)
            reporter = _Reporter(job, output, log, fork_server, contract, history)
            with Group(output, interruptions) as group:
                own = [gpus[slot] for slot in slots] if gpus else None
                environs = {
                    role.name: worker_environment(common, role, contract, own) for role in roles
                }
                start = partial(_start, group, fork_server, environs)
                started_at = time.time()
                forked = [name for name in environs if start(name)]
                reporter.started(list(environs), slots, forked, started_at)
                reporter.report_fork_server()
                running = Running(
                    group,
                    Members.of(roles),
                    contract,
                    job.limits,
                    reporter.listener,
                    job.budgets.replacements,
                    start,
                )
                outcome = running.until_end()
            reporter.ended(outcome)
            history.append(Attempt(slots, outcome, contract.newest_saves()))
            next_ = decide(history, job.budgets)
            if isinstance(next_, Again):
                reporter.again(next_)
                slots = next_.slots
                if not (signals := _pause(next_, interruptions)):
                    continue
                interrupted = replace(outcome, interrupted_by=signals[0])
                history[-1] = replace(history[-1], outcome=interrupted)
                next_ = decide(history, job.budgets)
            if isinstance(next_, End):
                log.note(Ended(next_.code, next_.why), len(history) - 1)
                if next_.code == 0 and not _is_untrained(history[-1].outcome):
                    _report_to_own_supervisor(environ)
                for line in closing_report(history, next_, time.monotonic() - started_s):
                    output.note(line)
                return next_.code


def _start(
    group: Group, fork_server: ForkServer, environs: Mapping[str, Mapping[str, str]], name: str
) -> bool:
    """Starts or restarts a process of this attempt. Returns True if it was forked."""
    started, is_forked = fork_server.start(environs[name])
    group.add(name, started)
    return is_forked


def _pause(next_: Again, interruptions: Interruptions) -> list[signal.Signals]:
    """Pauses before a restart. Returns the signals that interrupted the pause."""
    select.select([interruptions], [], [], next_.pause_secs)
    return interruptions.received()


class _Reporter:
    """Reports the events of an attempt, and prepares the fork server once it trains."""

    def __init__(
        self,
        job: Job,
        output: Output,
        log: EventLog,
        fork_server: ForkServer,
        contract: Supervised,
        history: Sequence[Attempt],
    ) -> None:
        self._job = job
        self._output = output
        self._log = log
        self._fork_server = fork_server
        self._contract = contract
        self._away: set[str] = set()  # workers that have exited and not rejoined yet
        self._before = history[-1].outcome if history else None
        self._number = len(history)
        self._failures = sum(not each.outcome.is_preempted for each in history)

    @property
    def listener(self) -> Listener:
        return Listener(self.failed, self.training, self.replaced, self.back)

    def started(
        self, workers: Sequence[str], slots: Sequence[int], forked: Sequence[str], at: float
    ) -> None:
        self._workers = workers
        self._forked, self._has_trained = set(forked), False
        self._log.note(Started(tuple(workers), tuple(slots), tuple(forked)), self._number, at)

    def ended(self, outcome: Outcome) -> None:
        if self._forked and not self._has_trained and outcome.first_failure is not None:
            self._fork_server.turn_off("forked workers did not reach their first step")

    def training(self, reports: Mapping[str, Status]) -> None:
        self._has_trained = True
        told = Training()
        if self._before is not None:
            report = recovery_report(self._before, reports)
            failure = self._before.first_failure
            assert failure is not None
            reached = max(status.since[Phase.TRAINING] for status in reports.values())
            told = Training(reached - failure.at, str(failure))
            self._output.note(report)
        self._log.note(told, self._number)
        self._prepare_fork_server()

    def replaced(self, replaced: Replaced) -> None:
        if replaced.exit.worker in self._away:
            self._fork_server.turn_off(f"{replaced.exit.worker} exited again before rejoining")
        self._away.add(replaced.exit.worker)
        ended, times = replaced.exit, f"worker restart {replaced.times}"
        if replaced.pause_secs:
            times += f", after a pause of {replaced.pause_secs:g} s"
        self._output.note(f"{ended}; the others continue; {times}")
        what = StartedAgain(
            ended.worker,
            ended.cause.name,
            ended.exit_code,
            replaced.times,
            replaced.pause_secs,
            f"{ended}; {times}",
        )
        self._log.note(what, self._number)

    def back(self, worker: str, secs: float) -> None:
        self._away.discard(worker)
        self._output.note(f"{worker} rejoined after {secs:.1f} s")
        self._prepare_fork_server()

    def _prepare_fork_server(self) -> None:
        self._fork_server.prepare(self._contract.settings())
        self.report_fork_server()

    def report_fork_server(self) -> None:
        for what in self._fork_server.notes():
            self._output.note(what)

    def failed(self, failures: Sequence[Exit]) -> None:
        for failure in failures:
            what = Failed(failure.worker, failure.cause.name, failure.exit_code, str(failure))
            self._log.note(what, self._number)
        told = all(failure.cause is Cause.PREEMPTED for failure in failures)
        everyone = "processes" if self._job.ps else "workers"
        stopping = f"; stopping all {everyone}" if len(self._workers) > 1 and not told else ""
        self._output.note("; ".join(str(failure) for failure in failures) + stopping)

    def again(self, next_: Again) -> None:
        what = "restarting"
        if not next_.was_preempted:
            what = f"restart {self._failures + 1} of {self._job.budgets.failures}"
        if next_.given_up is not None:
            what += f", with {counted(len(next_.slots), 'worker')}, because the one in slot "
            what += f"{next_.given_up} keeps failing (--min-workers)"
        if next_.pause_secs:
            what += f", after a pause of {next_.pause_secs:g} s"
        self._output.note(what)
        self._log.note(events.Again(next_.pause_secs, next_.slots), self._number)


def _is_untrained(outcome: Outcome) -> bool:
    return any(exit_.cause is Cause.UNTRAINED for exit_ in outcome.exits)


def _report_to_own_supervisor(environ: Mapping[str, str]) -> None:
    """Reports completion if this job is itself the single worker of another supervisor."""
    if (contract := Supervised.from_env(environ)) is not None:
        contract.report("worker-0", Phase.COMPLETED)


def closing_report(history: Sequence[Attempt], end: End, elapsed_secs: float) -> list[str]:
    """Returns the last lines of a job's output: its outcome, the earliest cause first."""
    last = history[-1].outcome
    if last.interrupted_by is not None:
        return [f"{end.why}: {'; '.join(str(exit_) for exit_ in last.exits)}"]
    failure = last.first_failure
    if failure is None:
        if _is_untrained(last):
            return [
                f"{counted(len(history[-1].slots), 'worker')} exited with code 0 after "
                f"{elapsed_secs:.1f} s, without a `fit` with keras_distplug's callbacks: the "
                "job is not restarted. To resume training after a failure, pass "
                "callbacks=keras_distplug.defaults(...) to `fit`"
            ]
        trainers = [exit_.worker for exit_ in last.exits if exit_.cause is Cause.COMPLETED]
        is_served = len(trainers) < len(last.exits)
        everyone = trainers[0] if is_served else counted(len(history[-1].slots), "worker")
        restarts = counted(sum(not each.outcome.is_preempted for each in history[:-1]), "restart")
        if alone := sum(each.outcome.replaced for each in history):
            restarts += f", {counted(alone, 'worker restart')}"
        return [f"{everyone} completed training in {elapsed_secs:.1f} s, {restarts}"]
    lines = [f"{end.why}; exit code {end.code}", f"first failure: {_with_time(failure)}"]
    for exit_ in last.exits:
        if exit_ is not failure:
            lines.append(f"  then: {_consequence(exit_, failure)}")
    for attempt in history[:-1]:
        if attempt.outcome.first_failure:
            lines.append(f"  earlier: {_with_time(attempt.outcome.first_failure)}")
    return lines


def recovery_report(before: Outcome, reports: Mapping[str, Status]) -> str:
    """Returns a line about the time from a failure until all workers train again."""
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
        if moments:  # the time of a phase that the script skips counts towards the next one
            parts.append(f"{what} {max(moments) - reached:.1f} s")
            reached = max(moments)
    return f"training again {reached - failure.at:.1f} s after {failure.brief}: {', '.join(parts)}"


def _consequence(exit_: Exit, failure: Exit) -> str:
    if exit_.cause is Cause.COMPLETED:
        return str(exit_)
    return f"{exit_}, {max(0.0, exit_.at - failure.at):.1f} s later"


def _with_time(exit_: Exit) -> str:
    return f"{exit_} at {time.strftime('%H:%M:%S', time.localtime(exit_.at))}"


def _describe(job: Job) -> str:
    workers = counted(job.workers, "worker")
    return f"a chief, {workers} and {counted(job.ps, 'parameter server')}" if job.ps else workers
