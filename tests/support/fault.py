"""The faults in a job: which process, when, and how often. All fault tests use them.

    fault.kill(worker=1, at_step=7)
    fault.nan(worker=1, at_step=3)
    fault.fails_to_write(worker=0, at_step=5, saves=2)
    fault.flaky_store(rate=0.3, secs=5, at_step=9)

A step is a batch of the whole training, by its position in the data, counted from 0. A fault occurs
after its step, once all earlier faults of the list have occurred, and only once, however often the
step is repeated. Loads neither TensorFlow nor the package: a test writes the faults (`write`),
`support/harm.py` causes them in the processes of the job and records every one, and `fired` reads
these records.
"""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Moment = Literal[
    "step",
    "before fit",
    "begin",
    "saving",
    "in a call",
    "validation",
    "epoch",
    "input",
    "data",
    "end",
]
"""Points in time: after a step; just before `fit`; before training resumes; when the save due after
the step has started to write; before a file operation; in the validation, or at the end, of the
step's epoch; when the step's batch is created; in that batch; after `fit`."""

Who = int | str
"""A worker's number, or, with parameter servers, the name of a process: `"chief-0"`, `"ps-0"`."""

FAULTS, FIRED = "faults.json", "fired"
FIRST_BATCHES = "batches"  # of every process of the chief


@dataclass(frozen=True)
class Fault:
    """A fault, created by the functions below.

    Args:
        kind: Kind of fault.
        who: Name of the affected process.
        at_step: Step after which it occurs; for a fault in a call, the number of the call it
            precedes, counted from 1.
        moment: Point of that step at which it occurs.
        every_time: True if it recurs in every attempt.
        after: Number of faults that must have occurred before; None for all earlier ones of the
            list.
        secs: Duration in seconds, if limited.
        count: Number of saves that fail.
        number: Number of the signal or of the error.
        rate: Share of requests.
        where: Part of the batch.
    """

    kind: str
    who: str
    at_step: int = 0
    moment: Moment = "step"
    every_time: bool = False
    after: int | None = None
    secs: float = 0.0
    count: int = 1
    number: int = 0
    rate: float = 0.0
    where: str = "x"

    def __str__(self) -> str:
        at = f"after step {self.at_step}" if self.moment == "step" else self.moment
        return f"{self.kind} of {self.who} {at}"


@dataclass(frozen=True)
class Came:
    """A fault that has occurred.

    Args:
        index: Index of the fault in the list.
        at: Time in seconds since 1970.
        who: Process in which it occurred.
        steps: Position of the process in the data; None before its first step.
        file: Damaged file, relative to the folder of its run.
    """

    index: int
    at: float
    who: str
    steps: int | None
    file: str = ""


def kill(worker: Who = 0, at_step: int = 0, moment: Moment = "step") -> Fault:
    """SIGKILL."""
    return Fault("kill", _name(worker), at_step, moment)


def kill_in_call(number: int, worker: Who = 0) -> Fault:
    """SIGKILL before a call that syncs, links, creates or deletes a file or folder.

    Only the `number`-th such call since the process started to train is affected.
    """
    return Fault("kill", _name(worker), number, "in a call")


def crash(worker: Who = 0, at_step: int = 0, moment: Moment = "step") -> Fault:
    """SIGSEGV."""
    return Fault("crash", _name(worker), at_step, moment)


def abort(worker: Who = 0, at_step: int = 0, moment: Moment = "step") -> Fault:
    """SIGABRT, raised by the process itself."""
    return Fault("abort", _name(worker), at_step, moment)


def error(
    worker: Who = 0, at_step: int = 0, moment: Moment = "step", every_time: bool = False
) -> Fault:
    """An exception."""
    return Fault("error", _name(worker), at_step, moment, every_time)


def leave(worker: Who = 0, at_step: int = 0, moment: Moment = "step") -> Fault:
    """`sys.exit(0)` during training."""
    return Fault("leave", _name(worker), at_step, moment)


def vanish(worker: Who = 0, at_step: int = 0, moment: Moment = "step") -> Fault:
    """`os._exit(9)`: exit without any cleanup."""
    return Fault("vanish", _name(worker), at_step, moment)


def lose(worker: Who = 0, at_step: int = 0) -> Fault:
    """SIGKILL, and the loss of the worker's local checkpoints."""
    return Fault("lose", _name(worker), at_step)


def preempt(
    number: signal.Signals,
    worker: Who = 0,
    at_step: int = 0,
    moment: Moment = "step",
    after: int | None = None,
) -> Fault:
    """A signal that preempts a worker."""
    return Fault("preempt", _name(worker), at_step, moment, number=number, after=after)


def stop(worker: Who = 0, at_step: int = 0) -> Fault:
    """SIGSTOP."""
    return Fault("stop", _name(worker), at_step)


def lock(worker: Who = 0, at_step: int = 0) -> Fault:
    """C code holds the interpreter's lock forever."""
    return Fault("lock", _name(worker), at_step)


def starve(worker: Who = 0, at_step: int = 0) -> Fault:
    """The batch of the step never arrives."""
    return Fault("starve", _name(worker), at_step, "input")


def stray(worker: Who = 0, at_step: int = 0) -> Fault:
    """Waits for a collective that no other worker calls."""
    return Fault("stray", _name(worker), at_step)


def slow(secs: float, worker: Who = 0, at_step: int = 0) -> Fault:
    """One step takes longer by this time."""
    return Fault("slow", _name(worker), at_step, secs=secs)


def nan(worker: Who = 0, at_step: int = 0, where: Literal["x", "y", "weight"] = "x") -> Fault:
    """NaN in the samples, labels or weights of the worker's first replica.

    It occurs every time that the batch is created, independently of other faults.
    """
    return Fault("nan", _name(worker), at_step, "data", every_time=True, after=0, where=where)


def fails_to_write(
    worker: Who = 0, at_step: int = 0, saves: int = 1, number: int = errno.ENOSPC
) -> Fault:
    """The worker cannot write its part of the next saves."""
    return Fault("fails_to_write", _name(worker), at_step, count=saves, number=number)


def truncate(worker: Who = 0, at_step: int = 0) -> Fault:
    """A file of the newest checkpoint loses its second half, and the worker is killed."""
    return Fault("truncate", _name(worker), at_step)


def flip(worker: Who = 0, at_step: int = 0) -> Fault:
    """A bit in a file of the newest checkpoint is flipped, and the worker is killed."""
    return Fault("flip", _name(worker), at_step)


def flaky_store(rate: float, secs: float, at_step: int = 0) -> Fault:
    """For a time, a share of the requests to the store fails in various ways.

    The test must cause this once the chief has recorded the fault.
    """
    return Fault("flaky_store", _name(0), at_step, rate=rate, secs=secs)


def own(kind: str, worker: Who = 0, at_step: int = 0) -> Fault:
    """A fault specific to the job's script, which passes it to `Harm` by name.

    It occurs independently of other faults.
    """
    return Fault(kind, _name(worker), at_step, after=0)


def write(folder: Path, faults: Sequence[Fault]) -> None:
    """Writes the faults for the processes of a job in `folder`."""
    (folder / FAULTS).write_text(json.dumps([asdict(each) for each in faults]))


def read(folder: Path) -> list[Fault]:
    """Reads the faults; returns none if nothing was written."""
    file = folder / FAULTS
    return [Fault(**each) for each in json.loads(file.read_text())] if file.exists() else []


def note(file: Path, came: Came) -> None:
    """Records a fault immediately for all processes, which share the file."""
    line = json.dumps(asdict(came)) + "\n"
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def noted(file: Path) -> list[Came]:
    """Returns all records so far."""
    text = file.read_text() if file.exists() else ""
    whole, _, _ = text.rpartition("\n")
    return [Came(**json.loads(line)) for line in whole.splitlines()]


def fired(folder: Path) -> list[Came]:
    """Returns the faults of the job in `folder` that have occurred so far."""
    return noted(folder / FIRED)


def _name(worker: Who) -> str:
    return worker if isinstance(worker, str) else f"worker-{worker}"
