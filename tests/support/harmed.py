"""Runs a job with faults under the supervisor, and reports the outcome of every fault."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from support import fault
from support.cluster import run_job
from support.fault import Came, Fault

from keras_distplug.core import events
from keras_distplug.core.events import Entry, Event
from keras_distplug.runlog import log_files
from keras_distplug.runlog.goodput_totals import Fit
from keras_distplug.storage.files import open_files

SCRIPT = Path(__file__).parents[1] / "workers" / "harmed.py"

Outcome = dict[str, np.ndarray]


@dataclass(frozen=True)
class SetUp:
    """The number of workers, replicas per worker, and parameter servers."""

    title: str
    workers: int = 1
    replicas: int = 1
    servers: int = 0


@dataclass(frozen=True)
class Job:
    """A training.

    Args:
        set_up: Setup of the job.
        directory: Directory of the checkpoints.
        storage_options: Options of their store.
        epochs: Maximum number of epochs.
        batches: Number of batches in an epoch.
        global_batch: Number of samples in a batch.
        save_freq: Number of batches between checkpoints.
    """

    set_up: SetUp
    directory: str
    storage_options: Mapping[str, Any] | None = None
    epochs: int = 4
    batches: int = 12
    global_batch: int = 12
    save_freq: int = 4

    def write(self, folder: Path) -> None:
        (folder / "job.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Job:
        found = json.loads((folder / "job.json").read_text())
        return cls(**{**found, "set_up": SetUp(**found["set_up"])})


@dataclass(frozen=True)
class Result:
    """The outcome of a fault.

    Args:
        fault: The fault.
        came: Number of times it occurred.
        cause: First report of it; None without one.
        detected_secs: Seconds from its first occurrence to the report.
        recovered_secs: Seconds until the end of the first batch after a restart; None without one.
        steps_lost: Number of repeated steps; None without a restart.
        file: Damaged file.
        next_secs: Seconds until the next fault, other than in the data; None without one.
    """

    fault: Fault
    came: int
    cause: str | None = None
    detected_secs: float | None = None
    recovered_secs: float | None = None
    steps_lost: int | None = None
    file: str = ""
    next_secs: float | None = None

    @property
    def is_named(self) -> bool:
        return is_named(self.fault, self.cause, self.file)


@dataclass(frozen=True)
class Ended:
    """A completed job.

    Args:
        outcomes: Outcome on every worker.
        results: Outcome of every fault.
        printed: Output of all processes.
        fits: Logs of the workers.
        supervised: Log of the supervisor.
    """

    outcomes: list[Outcome]
    results: list[Result]
    printed: str
    fits: list[Fit] = field(repr=False)
    supervised: list[Entry] = field(repr=False)


def run(
    folder: Path,
    job: Job,
    faults: Sequence[Fault] = (),
    *options: str,
    timeout_s: float,
) -> Ended:
    """Runs a job until all workers have completed training, which they must."""
    folder.mkdir(exist_ok=True)
    job.write(folder)
    fault.write(folder, faults)
    many = str(len(faults) + 3)
    given = ["--max-restarts", many, "--max-without-progress", many]
    given += ["--unresponsive-timeout", "40", "--heartbeat-timeout", "40"]
    if job.set_up.servers:
        given += ["--ps", str(job.set_up.servers)]
    ended = run_job(
        [str(SCRIPT), str(folder)], job.set_up.workers, *given, *options, timeout_s=timeout_s
    )
    if ended.returncode:
        raise JobFailedError(ended.returncode, ended.output)
    return read(folder, job, ended.output)


class JobFailedError(AssertionError):
    """A job that has not been completed."""

    def __init__(self, returncode: int, printed: str) -> None:
        super().__init__(f"the job has ended with {returncode}:\n{printed[-20_000:]}")


def read(folder: Path, job: Job, printed: str = "") -> Ended:
    """Returns the outcome of a finished job."""
    files = open_files(job.directory, job.storage_options)
    fits, supervised = log_files.read(files, "run-0001")
    reports = [*supervised, *(entry for each in fits for entry in each.entries)]
    reports.sort(key=lambda entry: entry.at)
    faults, fired = fault.read(folder), fault.fired(folder)
    first_batches = fault.noted(folder / fault.FIRST_BATCHES)
    results = []
    for index, each in enumerate(faults):
        came = [one for one in fired if one.index == index]
        others = [
            one.at for one in fired if one.index != index and not _is_of_data(faults[one.index])
        ]
        place = divmod(each.at_step, job.batches)
        results.append(_result(each, place, came, others, reports, first_batches, printed))
    names = (
        ["chief-0"] if job.set_up.servers else [f"worker-{n}" for n in range(job.set_up.workers)]
    )
    outcomes = [dict(np.load(folder / f"outcome-{name}.npz")) for name in names]
    return Ended(outcomes, results, printed, fits, supervised)


def _is_of_data(of: Fault) -> bool:
    return of.moment == "data"


def _result(
    of: Fault,
    place: tuple[int, int],
    came: Sequence[Came],
    others: Sequence[float],
    reports: Sequence[Entry],
    first_batches: Sequence[Came],
    printed: str,
) -> Result:
    if not came:
        return Result(of, 0)
    at, file = came[0].at, came[0].file
    # Faults in the data may be delayed by another one; all others occur in order.
    until = min((each for each in others if each > at and not _is_of_data(of)), default=math.inf)
    next_secs = None if until == math.inf else until - at
    kinds = KINDS[of.kind].reported_by
    said = [e for e in reports if at <= e.at < until and isinstance(e.event, kinds)]
    if _is_of_data(of):
        said = [e for e in said if (e.event.epoch, e.event.batch) == place]
    named = (e for e in said if is_named(of, _text(e.event), file))
    first = next(named, next(iter(said), None))
    cause: str | None = None
    detected_secs = None
    if first is not None:
        cause = _text(first.event)
        detected_secs = first.at - max(each.at for each in came if each.at <= first.at)
    elif file or _is_of_data(of):
        # A dying process may lose its last log lines, but not its output.
        of_batch = f"epoch {place[0] + 1}, batch {place[1] + 1}: .*"
        of_file = f"is quarantined: .*{re.escape(file)}.*"
        word = re.search(of_file if file else of_batch, printed)
        cause = word and word[0]
    again = next((each for each in first_batches if at < each.at < until), None)
    if again is None or not KINDS[of.kind].restarts:
        return Result(of, len(came), cause, detected_secs, file=file, next_secs=next_secs)
    assert again.steps is not None
    # Preempted workers stop after a later step.
    lost = None if came[0].steps is None else max(0, came[0].steps - (again.steps - 1))
    recovered_secs = again.at - at
    return Result(of, len(came), cause, detected_secs, recovered_secs, lost, file, next_secs)


@dataclass(frozen=True)
class Kind:
    """The expected report of a kind of fault.

    Args:
        reported_by: Events that report it.
        cause: Pattern of the report; `{who}` is the process, `{signal}` and `{error}` are the
            signal and the error, `{file}` is the damaged file.
        restarts: True if all processes restart.
    """

    reported_by: tuple[type[Event], ...]
    cause: str
    restarts: bool = True


_FAILED = (events.Failed, events.StartedAgain)
_HUNG = "worker-\\d exited because training hung: "
KINDS = {
    "kill": Kind(_FAILED, "{who} was killed by SIGKILL"),
    "crash": Kind(_FAILED, "{who} was killed by SIGSEGV"),
    "abort": Kind(_FAILED, "{who} was killed by SIGABRT"),
    "error": Kind(_FAILED, "{who} exited with code 1"),
    "vanish": Kind(_FAILED, "{who} exited with code 9"),
    # A process may take longer to exit than its peers wait for it.
    "leave": Kind(
        _FAILED, "{who} exited without completing training|{who} .* or no longer in `fit`"
    ),
    "lose": Kind(_FAILED, "{who} was killed by SIGKILL"),
    "stop": Kind(
        _FAILED, _HUNG + r"{who} did not answer: suspended \(SIGSTOP\)|{who} .*no sign of life"
    ),
    # Usually, its own sentinel is first.
    "lock": Kind(_FAILED, "{who} was killed by SIGABRT|" + _HUNG + "{who} did not answer"),
    "starve": Kind(
        _FAILED,
        _HUNG + r"{who} (waits for its input|is) in batch \d+ of epoch \d+, with its input",
    ),
    "stray": Kind(_FAILED, _HUNG + r"{who} runs harm\.py:\d+ in "),
    "preempt": Kind((events.Preempted,), "{signal} to {who} on "),
    "slow": Kind((events.Failed, events.Hung), "^$", restarts=False),
    "nan": Kind((events.UpdateLeftOut,), r"replica \d+ \({who} on ", restarts=False),
    "fails_to_write": Kind((events.SaveFailed,), "{error}", restarts=False),
    "truncate": Kind((events.Quarantined,), "{file}"),
    "flip": Kind((events.Quarantined,), "{file}"),
    "flaky_store": Kind((), "", restarts=False),
}


def is_named(of: Fault, cause: str | None, file: str = "") -> bool:
    """Returns True if the report of a fault is as expected."""
    reports = {
        "{who}": of.who,
        "{signal}": signal.Signals(of.number).name if of.kind == "preempt" else "",
        "{error}": os.strerror(of.number),
        "{file}": re.escape(file) or "(?!)",  # no fault damages this file
    }
    pattern = KINDS[of.kind].cause
    for each, value in reports.items():
        pattern = pattern.replace(each, value)
    return bool(re.search(pattern, cause or ""))


def _text(event: Event) -> str:
    if isinstance(event, events.Preempted):
        return f"{event.what} to {event.where}"
    if isinstance(event, events.SaveFailed | events.Quarantined):
        return event.why
    failure_kinds = events.Failed | events.StartedAgain | events.Hung | events.UpdateLeftOut
    assert isinstance(event, failure_kinds), event
    return event.what


def differences(found: Outcome, expected: Outcome) -> list[str]:
    """Returns the parts that are not bit-identical."""
    assert found.keys() == expected.keys()
    return [
        name
        for name, array in expected.items()
        if (found[name].dtype, found[name].tobytes()) != (array.dtype, array.tobytes())
    ]
