"""The events of a run, reported by its workers and their supervisor as lines of JSON.

A line has `v` (the version of this format), `at` (seconds since 1970), `event`, `source` (a
worker's name, or `"supervisor"`), `job` and `attempt` (of the supervisor, or null), and the fields
of the event's class. The event's name is the name of its class in snake case.

    {"v": 1, "at": 1795461633.2, "event": "saved", "source": "worker-0", "job": null,
     "attempt": null, "step": 42, "secs": 0.31, "is_local": false}

Readers ignore unknown events and fields. Fields with a default, `job` and `attempt` may be missing.
Numbers that are not finite are written as null. Adding a field requires a default, but no new
version; removing a field or changing its meaning requires a new version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

VERSION = 1
SUPERVISOR = "supervisor"


def get_name(kind: type[Event]) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


@dataclass(frozen=True)
class Event:
    """Base class of events."""

    kinds: ClassVar[dict[str, type[Event]]] = {}

    def __init_subclass__(cls) -> None:
        Event.kinds[get_name(cls)] = cls


# Events of a worker's `fit`


@dataclass(frozen=True)
class Began(Event):
    """`fit` has started on a worker; its first epoch follows.

    Args:
        session: ID of this `fit`, the same on all of its workers.
        rank: Rank of the worker.
        workers: Number of workers.
        replicas: Number of replicas on all workers together.
        host: Host name of the worker's machine.
        pid: Process number of the worker.
        strategy: Class name of the `tf.distribute.Strategy`.
        epochs: The `epochs` argument of `fit`.
        step: Number of batches trained since the start of the run.
        versions: Versions of packages by name. Defaults to none.
        resumes: True (the default) if checkpoints are saved, so that a later `fit` continues the
            run; False if every `fit` is a separate training.
        reached_before: The exact step at which the previous attempt of the run ended. Defaults to
            `None`: only its log has its last step.
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
    reached_before: int | None = None
    steps_per_epoch: int | None = None  # None if Keras does not know


@dataclass(frozen=True)
class Restored(Event):
    """A worker has restored a checkpoint.

    Args:
        step: Number of batches trained since the start of the run.
        epoch: The next epoch, or the current one if `batch` is not 0.
        batch: Number of batches already trained in `epoch`.
        checkpoint: Location of the checkpoint.
        is_local: True if it is on the worker's own machine. Defaults to False.
        secs: Duration of the restore in seconds. Defaults to 0.
    """

    step: int
    epoch: int
    batch: int
    checkpoint: str
    is_local: bool = False
    secs: float = 0.0


@dataclass(frozen=True)
class ReplicaTimes:
    """Timings of a replica in a window.

    Args:
        replica: Number of the replica.
        compute_s: Typical computing time of a step, in seconds.
        sync_s: Typical wait for other replicas in a step, in seconds. Defaults to None, unknown.
    """

    replica: int
    compute_s: float
    sync_s: float | None = None


@dataclass(frozen=True)
class Window(Event):
    """Time spent by a worker since its previous window, or since its start.

    Args:
        step: Number of batches trained since the start of the run, at the end of the window.
        steps: Number of batches trained in the window.
        epoch: Epoch at the end of the window.
        secs: Seconds by `Category`; they add up to the duration of the window.
        step_s: Median duration of a step in seconds. Defaults to None, without a step.
        input_s: Mean time per step spent waiting for data, in seconds. Defaults to None, unknown;
            `secs` then has no such time either.
        memory_bytes: Memory of the process. Defaults to None, unknown.
        replicas: Timings of the worker's own replicas. Defaults to none.
    """

    step: int
    steps: int
    epoch: int
    secs: Mapping[str, float]
    step_s: float | None = None
    input_s: float | None = None
    memory_bytes: int | None = None
    replicas: tuple[ReplicaTimes, ...] = ()
    loss: float | None = None  # as Keras logs it after the last batch: the mean of the epoch so far


@dataclass(frozen=True)
class EpochEnded(Event):
    """An epoch has ended.

    Args:
        epoch: Epoch, counted from 0 as in Keras.
        step: Number of batches trained since the start of the run.
        logs: Logs of the epoch.
    """

    epoch: int
    step: int
    logs: Mapping[str, float | None]


@dataclass(frozen=True)
class Saved(Event):
    """A checkpoint is complete.

    Args:
        step: Step of the checkpoint.
        secs: Duration of the save in the background, in seconds.
        is_local: True if the checkpoint is on the worker's own machine. Defaults to False.
        stall_secs: Time that training stopped for the save, in seconds. Defaults to 0.
        checkpoint_bytes: Size of its arrays. Defaults to 0.
    """

    step: int
    secs: float
    is_local: bool = False
    stall_secs: float = 0.0
    checkpoint_bytes: int = 0


@dataclass(frozen=True)
class SaveFailed(Event):
    """A checkpoint could not be saved.

    Args:
        step: Step of the checkpoint.
        in_a_row: Number of consecutive failures. Defaults to 1.
        is_local: True if it was for the worker's own machine. Defaults to False.
        why: Readable reason. Defaults to none.
    """

    step: int
    in_a_row: int = 1
    is_local: bool = False
    why: str = ""


@dataclass(frozen=True)
class Quarantined(Event):
    """A damaged checkpoint has been quarantined."""

    checkpoint: str
    why: str = ""


@dataclass(frozen=True)
class Preempted(Event):
    """The workers were preempted and end this `fit`.

    Args:
        what: The signal or the cloud's notice.
        where: The worker that received it. Defaults to none.
        is_user: True if it was Ctrl-C. Defaults to False.
        step: Step of the newest checkpoint of this `fit`. Defaults to None, no checkpoint.
    """

    what: str
    where: str = ""
    is_user: bool = False
    step: int | None = None


@dataclass(frozen=True)
class SlowReplica(Event):
    """A straggler was found, or has recovered.

    Args:
        cause: `"compute"`, `"input"` or `"network"`.
        rank: Rank of the worker.
        where: Name and machine of the worker.
        own_s: Its own time per step, in seconds.
        replica: Number of the replica. Defaults to None, if the whole worker is slow.
        others_s: The others' time per step, in seconds. Defaults to None, nothing to compare with.
        is_over: True if it is as fast as the others again. Defaults to False.
        what: Readable description. Defaults to none.
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
    """An update was skipped because of NaN, Inf or a spike.

    Args:
        epoch: Epoch, counted from 0.
        batch: Batch in the epoch, counted from 0. Defaults to None, unknown.
        in_a_row: Number of consecutive skipped updates, including this one. Defaults to 1.
        replicas: Numbers of the replicas that caused it. Defaults to none: only the sum of their
            gradients is affected.
        where: Workers of these replicas. Defaults to none.
        variable: First variable with a non-finite gradient. Defaults to None, if all are finite.
        origin: First non-finite value of the step. Defaults to None, unknown.
        is_transient: True if everything was finite when computed again. Defaults to False.
        score: Deviation of the gradients' norm from earlier norms. Defaults to None, if the norm
            is not finite.
        what: Readable description. Defaults to none.
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
    """The model was rolled back to a checkpoint; training continues with the next batch.

    Args:
        to_step: Step of the checkpoint.
        times: Number of rollbacks in this `fit`, including this one. Defaults to 1.
        why: Readable reason. Defaults to none.
    """

    to_step: int
    times: int = 1
    why: str = ""


@dataclass(frozen=True)
class Diverged(Event):
    """The weights of replicas have diverged.

    Args:
        step: Number of updates at the time of the comparison.
        variable: First variable that differs.
        variables: Number of variables that differ. Defaults to 1.
        replicas: Numbers of the replicas that differ from the majority. Defaults to none.
        where: Workers of these replicas. Defaults to none.
        what: Readable description. Defaults to none.
    """

    step: int
    variable: str
    variables: int = 1
    replicas: tuple[int, ...] = ()
    where: tuple[str, ...] = ()
    what: str = ""


@dataclass(frozen=True)
class Hung(Event):
    """Training hangs; usually, the worker's process is then killed."""

    what: str


@dataclass(frozen=True)
class PeerLost(Event):
    """Another worker is gone, so this `fit` ends with an error."""

    who: str


@dataclass(frozen=True)
class Raised(Event):
    """This `fit` has ended with an error that no other event reports."""

    what: str


@dataclass(frozen=True)
class Beat(Event):
    """A worker's process is alive, although it has nothing else to report.

    Args:
        step: Batches trained since the run started.
        doing: The `Category` that time currently counts as.
        idle_s: Seconds since the last batch ended, or since `fit` started.
    """

    step: int | None = None
    doing: str | None = None
    idle_s: float | None = None


@dataclass(frozen=True)
class LinesLost(Event):
    """Lines of this log were dropped, because they could not be written for too long."""

    lines: int


@dataclass(frozen=True)
class TrackerFailed(Event):
    """An experiment tracker does not receive this training's metrics, and is retried.

    Args:
        tracker: Name of the tracker.
        why: Readable reason.
    """

    tracker: str
    why: str


@dataclass(frozen=True)
class Finished(Event):
    """`fit` has finished.

    Args:
        step: Number of batches trained since the start of the run.
        epochs: The `epochs` argument of `fit`.
        stopped_early: True if a callback stopped it before the last epoch. Defaults to False.
    """

    step: int
    epochs: int
    stopped_early: bool = False


# Events of a supervisor


@dataclass(frozen=True)
class Started(Event):
    """The processes of an attempt have been started.

    Args:
        workers: Names of the processes: "worker-0"; with parameter servers also "chief-0", "ps-0".
        slots: Places in the job that the workers occupy. Defaults to none.
        forked: Names of those started by the fork server. Defaults to none.
    """

    workers: tuple[str, ...]
    slots: tuple[int, ...] = ()
    forked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Training(Event):
    """All workers have trained their first batch of this attempt.

    With parameter servers, only the chief's first batch counts.

    Args:
        secs: Seconds since the previous failure. Defaults to None, in the first attempt.
        after: Readable description of that failure. Defaults to None.
    """

    secs: float | None = None
    after: str | None = None


@dataclass(frozen=True)
class Failed(Event):
    """A worker has failed. If several fail, the first one caused the others.

    Args:
        worker: Name of the worker.
        cause: Kind of failure.
        exit_code: Exit code, as a shell reports it.
        what: Readable description. Defaults to none.
    """

    worker: str
    cause: str
    exit_code: int
    what: str = ""


@dataclass(frozen=True)
class StartedAgain(Event):
    """One worker of a group with parameter servers has exited and is restarted.

    The other processes keep running, so the attempt has not failed.

    Args:
        worker: Name of the worker.
        cause: Kind of exit.
        exit_code: Exit code, as a shell reports it.
        times: Number of such restarts in this attempt, including this one. Defaults to 1.
        pause_secs: Delay before the restart, in seconds. Defaults to 0.
        what: Readable description. Defaults to none.
    """

    worker: str
    cause: str
    exit_code: int
    times: int = 1
    pause_secs: float = 0.0
    what: str = ""


@dataclass(frozen=True)
class Again(Event):
    """All workers are restarted.

    Args:
        pause_secs: Delay before the restart, in seconds. Defaults to 0.
        slots: Places in the job that the workers occupy. Defaults to none.
    """

    pause_secs: float = 0.0
    slots: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ended(Event):
    """The job has ended."""

    exit_code: int
    why: str = ""


LAST_WORDS = Finished | Preempted | PeerLost | Raised
"""Events after which a worker trains no more steps."""

# Lines of a log


@dataclass(frozen=True)
class Entry:
    """An event with its time and source.

    Args:
        at: Time in seconds since 1970.
        source: Name of the worker, or `SUPERVISOR`.
        event: The event.
        job: ID of the supervisor's job. Defaults to None, without a supervisor.
        attempt: Number of the attempt in that job. Defaults to None, without a supervisor.
    """

    at: float
    source: str
    event: Event
    job: str | None = None
    attempt: int | None = None
