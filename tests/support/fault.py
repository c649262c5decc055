"""What goes wrong in a job: to whom, where, and how often. One vocabulary for all tests of faults.

    fault.kill(worker=1, at_step=7)
    fault.nan(worker=1, at_step=3)
    fault.fails_to_write(worker=0, at_step=5, saves=2)
    fault.flaky_store(rate=0.3, secs=5, at_step=9)

A step is a batch of the whole training, by its place in the data, counted from 0. A fault comes
behind its step once the faults before it in the list have come, and once only, however often that
step is trained again. Loads neither TensorFlow nor the package: a test writes faults down
(`write`), `support/harm.py` does them in the processes of the job, and notes each as it comes,
which `fired` reads.
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
"""Behind a step; when `fit` is about to be called; before training goes on; when a save that is due
behind the step has begun to be written; when a file is about to be worked on; in the validation, or
at the end, of the step's epoch; when the step's batch is made; in that batch; when `fit` has
returned."""

Who = int | str
"""A worker's number, or the name of a process beside parameter servers: `"chief-0"`, `"ps-0"`."""

FAULTS, FIRED = "faults.json", "fired"
FIRST_BATCHES = "batches"  # of each process of the chief


@dataclass(frozen=True)
class Fault:
    """Made by the functions below.

    Args:
        kind: What happens.
        who: The name of the process to which it happens.
        at_step: Behind which step; before which call, counted from 1, if the moment is in one.
        moment: When there.
        every_time: Whether it comes again in each attempt.
        after: How many faults have to have come before; None for all before it in the list.
        secs: How long it lasts, where it ends.
        count: Of saves that fail.
        number: Of the signal, or of the error.
        rate: Share of requests.
        where: The part of the batch.
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
        at = f"behind step {self.at_step}" if self.moment == "step" else self.moment
        return f"{self.kind} of {self.who} {at}"


@dataclass(frozen=True)
class Came:
    """A fault that has come.

    Args:
        index: Of the fault in the list.
        at: `time.time()`.
        who: The process that it came to.
        steps: The process had trained so far in the data; None if none yet.
        file: That was damaged, in the folder of its run.
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
    """SIGKILL before what is, since the process has begun to train, the `number`-th file or folder
    to be synced, linked, made or deleted."""
    return Fault("kill", _name(worker), number, "in a call")


def crash(worker: Who = 0, at_step: int = 0, moment: Moment = "step") -> Fault:
    """SIGSEGV."""
    return Fault("crash", _name(worker), at_step, moment)


def abort(worker: Who = 0, at_step: int = 0, moment: Moment = "step") -> Fault:
    """SIGABRT, of the process itself."""
    return Fault("abort", _name(worker), at_step, moment)


def error(
    worker: Who = 0, at_step: int = 0, moment: Moment = "step", every_time: bool = False
) -> Fault:
    """An exception."""
    return Fault("error", _name(worker), at_step, moment, every_time)


def leave(worker: Who = 0, at_step: int = 0, moment: Moment = "step") -> Fault:
    """`sys.exit(0)` in mid-training."""
    return Fault("leave", _name(worker), at_step, moment)


def vanish(worker: Who = 0, at_step: int = 0, moment: Moment = "step") -> Fault:
    """`os._exit(9)`: nothing of the process is cleaned up."""
    return Fault("vanish", _name(worker), at_step, moment)


def lose(worker: Who = 0, at_step: int = 0) -> Fault:
    """SIGKILL, and what the worker has kept on its own machine is gone."""
    return Fault("lose", _name(worker), at_step)


def tell(
    number: signal.Signals,
    worker: Who = 0,
    at_step: int = 0,
    moment: Moment = "step",
    after: int | None = None,
) -> Fault:
    """A signal that tells a worker to go."""
    return Fault("tell", _name(worker), at_step, moment, number=number, after=after)


def stop(worker: Who = 0, at_step: int = 0) -> Fault:
    """SIGSTOP."""
    return Fault("stop", _name(worker), at_step)


def lock(worker: Who = 0, at_step: int = 0) -> Fault:
    """Code in C keeps the interpreter's lock, for ever."""
    return Fault("lock", _name(worker), at_step)


def starve(worker: Who = 0, at_step: int = 0) -> Fault:
    """The batch of the step never comes."""
    return Fault("starve", _name(worker), at_step, "input")


def stray(worker: Who = 0, at_step: int = 0) -> Fault:
    """Waits for a collective that nobody else calls."""
    return Fault("stray", _name(worker), at_step)


def slow(secs: float, worker: Who = 0, at_step: int = 0) -> Fault:
    """One step takes so much longer."""
    return Fault("slow", _name(worker), at_step, secs=secs)


def nan(worker: Who = 0, at_step: int = 0, where: Literal["x", "y", "weight"] = "x") -> Fault:
    """NaN in the samples, the labels or the weights of the worker's first replica, each time that
    the batch is made. It waits for no other fault."""
    return Fault("nan", _name(worker), at_step, "data", every_time=True, after=0, where=where)


def fails_to_write(
    worker: Who = 0, at_step: int = 0, saves: int = 1, number: int = errno.ENOSPC
) -> Fault:
    """The worker cannot write its share of the saves that are begun next."""
    return Fault("fails_to_write", _name(worker), at_step, count=saves, number=number)


def truncate(worker: Who = 0, at_step: int = 0) -> Fault:
    """A file of the newest checkpoint loses its second half, and the worker is killed."""
    return Fault("truncate", _name(worker), at_step)


def flip(worker: Who = 0, at_step: int = 0) -> Fault:
    """A bit in a file of the newest checkpoint is flipped, and the worker is killed."""
    return Fault("flip", _name(worker), at_step)


def flaky_store(rate: float, secs: float, at_step: int = 0) -> Fault:
    """For so long, so many of the requests to the store fail in one way or another. Who runs the
    job has to do it, when the chief has noted it."""
    return Fault("flaky_store", _name(0), at_step, rate=rate, secs=secs)


def own(kind: str, worker: Who = 0, at_step: int = 0) -> Fault:
    """What only the job's script can do, which gives it to `Harm` by this name. It waits for no
    other fault."""
    return Fault(kind, _name(worker), at_step, after=0)


def write(folder: Path, faults: Sequence[Fault]) -> None:
    """For the processes of a job in `folder`."""
    (folder / FAULTS).write_text(json.dumps([asdict(each) for each in faults]))


def read(folder: Path) -> list[Fault]:
    """The inverse of `write`; none if nothing was written."""
    file = folder / FAULTS
    return [Fault(**each) for each in json.loads(file.read_text())] if file.exists() else []


def note(file: Path, came: Came) -> None:
    """At once, for all processes: they share the file."""
    line = json.dumps(asdict(came)) + "\n"
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def noted(file: Path) -> list[Came]:
    """All so far."""
    text = file.read_text() if file.exists() else ""
    whole, _, _ = text.rpartition("\n")
    return [Came(**json.loads(line)) for line in whole.splitlines()]


def fired(folder: Path) -> list[Came]:
    """The faults of the job in `folder` that have come so far."""
    return noted(folder / FIRED)


def _name(worker: Who) -> str:
    return worker if isinstance(worker, str) else f"worker-{worker}"
