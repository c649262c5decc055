"""What happens to a run, as one line of JSON each: from its workers, and from their supervisor.

A line has `v` (the version of this format), `at` (seconds since 1970), `event`, `source` (a
worker's name, or `"supervisor"`), `job` and `attempt` (of the supervisor, or null), and the fields
of the event's class. The event's name is that of its class, in lower case, with underscores.

    {"v": 1, "at": 1795461633.2, "event": "saved", "source": "worker-0", "job": null,
     "attempt": null, "step": 42, "secs": 0.31, "is_local": false}

Readers ignore events and fields that they do not know. A field with a default may be missing, and
so may `job` and `attempt`. A number that is not finite is null. A new field needs a default and no
new version; a field that is removed or changes its meaning needs a new version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

VERSION = 1
SUPERVISOR = "supervisor"


def name_of(kind: type[Event]) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


@dataclass(frozen=True)
class Event:
    """Base of what may happen."""

    kinds: ClassVar[dict[str, type[Event]]] = {}

    def __init_subclass__(cls) -> None:
        Event.kinds[name_of(cls)] = cls


# Of a worker's `fit`


@dataclass(frozen=True)
class Began(Event):
    """`fit` has begun on a worker; its first epoch is about to.

    Args:
        session: The same for all workers of this `fit`, and no other one's.
        rank: Of the worker.
        workers: How many there are.
        replicas: On all of them together.
        host: Its machine.
        pid: Its process.
        strategy: The class of the `tf.distribute.Strategy`.
        epochs: That `fit` was asked for.
        step: Batches trained since the run began.
        versions: Of packages.
        resumes: Whether a run is kept that a `fit` after this one goes on with; without, each is a
            training of its own.
    """

    session: str
    rank: int
    workers: int
    replicas: int
    host: str
    pid: int
    strategy: str
    epochs: int
    step: int
    versions: Mapping[str, str] = field(default_factory=dict)
    resumes: bool = True


@dataclass(frozen=True)
class Restored(Event):
    """A checkpoint was taken up.

    Args:
        step: Batches trained since the run began.
        epoch: The one that comes next, or is under way.
        batch: Batches that were trained of it.
        checkpoint: Where it is.
        is_local: Whether that is the worker's own machine.
        secs: How long that took.
    """

    step: int
    epoch: int
    batch: int
    checkpoint: str
    is_local: bool = False
    secs: float = 0.0


@dataclass(frozen=True)
class OfReplica:
    """What a replica had in each step of a window, as in `StepReport`."""

    replica: int
    compute_s: float
    sync_s: float | None = None


@dataclass(frozen=True)
class Window(Event):
    """What a worker's time went to since the line before it of this kind, or since it began.

    Args:
        step: Batches trained since the run began, at its end.
        steps: Of these in this window.
        epoch: That it ends in.
        secs: Seconds by `Category`; all there were.
        step_s: A step, the median; None if there was none.
        input_s: Waiting for data in a step, the mean; None if that is not known, and then `secs`
            has none of it.
        memory_bytes: Of the process.
        replicas: The worker's own ones.
    """

    step: int
    steps: int
    epoch: int
    secs: Mapping[str, float]
    step_s: float | None = None
    input_s: float | None = None
    memory_bytes: int | None = None
    replicas: tuple[OfReplica, ...] = ()
    loss: float | None = None  # as Keras logs it after the last batch: the mean of the epoch so far


@dataclass(frozen=True)
class EpochEnded(Event):
    """An epoch is over.

    Args:
        epoch: Counted from 0, as Keras does.
        step: Batches trained since the run began.
        logs: Of the epoch.
    """

    epoch: int
    step: int
    logs: Mapping[str, float | None]


@dataclass(frozen=True)
class Saved(Event):
    """A checkpoint is complete.

    Args:
        step: Of it.
        secs: How long it took in the background.
        is_local: Whether it is on the worker's own machine.
        stall_secs: How long training stood still for it.
        checkpoint_bytes: Of its arrays.
    """

    step: int
    secs: float
    is_local: bool = False
    stall_secs: float = 0.0
    checkpoint_bytes: int = 0


@dataclass(frozen=True)
class SaveFailed(Event):
    """There is no checkpoint.

    Args:
        step: Of which it would have been.
        in_a_row: How many have failed now.
        is_local: As in `Saved`.
        why: For people.
    """

    step: int
    in_a_row: int = 1
    is_local: bool = False
    why: str = ""


@dataclass(frozen=True)
class Quarantined(Event):
    """A checkpoint was found damaged, and set aside."""

    checkpoint: str
    why: str = ""


@dataclass(frozen=True)
class Preempted(Event):
    """The workers were told to go, and end this `fit`.

    Args:
        what: The signal, or the cloud's notice.
        where: To whom.
        is_user: Whether it was ctrl-C.
        step: Of the newest checkpoint that this `fit` made; None if it made none.
    """

    what: str
    where: str = ""
    is_user: bool = False
    step: int | None = None


@dataclass(frozen=True)
class SlowReplica(Event):
    """A straggler was found, or is none any more.

    Args:
        cause: `"compute"`, `"input"` or `"network"`.
        rank: Of its worker.
        where: Its name, and its machine.
        own_s: What it takes.
        replica: Its number; None where it is the worker's.
        others_s: What the others take; None if there are none to compare with.
        is_over: Whether it takes as long as others again.
        what: For people.
    """

    cause: str
    rank: int
    where: str
    own_s: float
    replica: int | None = None
    others_s: float | None = None
    is_over: bool = False
    what: str = ""


@dataclass(frozen=True)
class UpdateLeftOut(Event):
    """An update was not applied, for NaN, Inf or a spike.

    Args:
        epoch: Counted from 0.
        batch: In the epoch, counted from 0; None if that is not known.
        in_a_row: How many updates in a row were not applied.
        replicas: That it came from; none if it came from their sum alone.
        where: The workers of these.
        variable: Whose gradient is the first that is not finite; None if all are.
        origin: What is not finite first; None if that is not known.
        is_transient: Whether all was finite when it was computed once more.
        score: How far the norm of the gradients is from others, where it is finite.
        what: For people.
    """

    epoch: int
    batch: int | None = None
    in_a_row: int = 1
    replicas: tuple[int, ...] = ()
    where: tuple[str, ...] = ()
    variable: str | None = None
    origin: str | None = None
    is_transient: bool = False
    score: float | None = None
    what: str = ""


@dataclass(frozen=True)
class RolledBack(Event):
    """The model was given the values of a checkpoint, and goes on with the batch that comes next.

    Args:
        to_step: Of the checkpoint.
        times: How often it was done in this `fit`.
        why: For people.
    """

    to_step: int
    times: int = 1
    why: str = ""


@dataclass(frozen=True)
class Diverged(Event):
    """Replicas do not have the same values any more.

    Args:
        step: How many updates there were.
        variable: The first that differs.
        variables: How many do.
        replicas: Those whose values are not those of most.
        where: The workers of these.
        what: For people.
    """

    step: int
    variable: str
    variables: int = 1
    replicas: tuple[int, ...] = ()
    where: tuple[str, ...] = ()
    what: str = ""


@dataclass(frozen=True)
class Hung(Event):
    """Training does not get on; the worker's process is ended, mostly."""

    what: str


@dataclass(frozen=True)
class PeerLost(Event):
    """Another worker is gone, and this `fit` ends with an error."""

    who: str


@dataclass(frozen=True)
class Raised(Event):
    """This `fit` has ended with an error that no other event tells of."""

    what: str


@dataclass(frozen=True)
class Beat(Event):
    """The worker's process is there, though there may be nothing else to tell for long."""


@dataclass(frozen=True)
class LinesLost(Event):
    """Lines of this log could not be written for so long that some were given up."""

    lines: int


@dataclass(frozen=True)
class TrackerFailed(Event):
    """An experiment tracker does not receive this training's metrics, and is tried again.

    Args:
        tracker: Its name.
        why: For people.
    """

    tracker: str
    why: str


@dataclass(frozen=True)
class Finished(Event):
    """`fit` has reached its end.

    Args:
        step: Batches trained since the run began.
        epochs: That it was asked for.
        stopped_early: Whether a callback ended it before that.
    """

    step: int
    epochs: int
    stopped_early: bool = False


# Of a supervisor


@dataclass(frozen=True)
class Started(Event):
    """The processes of an attempt are started.

    Args:
        workers: Their names: "worker-0", and "chief-0" and "ps-0" beside parameter servers.
        slots: The places in the job that the workers among them have.
        forked: Those of them that the fork server has started.
    """

    workers: tuple[str, ...]
    slots: tuple[int, ...] = ()
    forked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Training(Event):
    """All workers have trained their first batch of this attempt; beside parameter servers, the
    chief has.

    Args:
        secs: Since the failure before; None in the first attempt.
        after: That failure, for people.
    """

    secs: float | None = None
    after: str | None = None


@dataclass(frozen=True)
class Failed(Event):
    """A worker has failed; of several, the first one is the cause of the others.

    Args:
        worker: Its name.
        cause: What kind of failure.
        exit_code: As a shell has it.
        what: For people.
    """

    worker: str
    cause: str
    exit_code: int
    what: str = ""


@dataclass(frozen=True)
class StartedAgain(Event):
    """A worker of a group with parameter servers has ended, and is started again alone: the others
    go on. It is no failure of the attempt.

    Args:
        worker: Its name.
        cause: What kind of end.
        exit_code: As a shell has it.
        times: How often workers were started again in this attempt, this time included.
        pause_secs: After so long.
        what: For people.
    """

    worker: str
    cause: str
    exit_code: int
    times: int = 1
    pause_secs: float = 0.0
    what: str = ""


@dataclass(frozen=True)
class Again(Event):
    """All workers are started again.

    Args:
        pause_secs: After so long.
        slots: Those of the workers.
    """

    pause_secs: float = 0.0
    slots: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ended(Event):
    """The job is over."""

    exit_code: int
    why: str = ""


# As lines


@dataclass(frozen=True)
class Entry:
    """An event, and when and where it was.

    Args:
        at: `time.time()`.
        source: The worker's name, or `SUPERVISOR`.
        event: What it was.
        job: Of the supervisor.
        attempt: Of that job.
    """

    at: float
    source: str
    event: Event
    job: str | None = None
    attempt: int | None = None
