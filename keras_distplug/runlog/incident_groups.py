"""The incidents of a run in groups of equal ones, with advice."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from keras_distplug.core import events
from keras_distplug.core.events import SUPERVISOR, Entry, Event
from keras_distplug.runlog.goodput_totals import Fit


@dataclass(frozen=True)
class Incident:
    """Something that went wrong, once.

    Args:
        at: In seconds since 1970.
        event: The event.
        source: The worker that reported it, or `SUPERVISOR`.
        what: The event in words.
    """

    at: float
    event: Event
    source: str
    what: str


@dataclass(frozen=True)
class Group:
    """Equal incidents.

    Args:
        kind: The event's name.
        title: What happened, without the values that differ from one time to the next.
        count: How many incidents.
        first_at: The first one, in seconds since 1970.
        last_at: The newest one.
        what: The newest one in words.
        where: Workers, with their machines.
        replicas: Numbers of replicas.
        epoch: Epoch of the newest one, counted from 0; None if the event has none.
        batch: Batch of the newest one in that epoch, likewise.
        advice: What to do.
        command: A command line that helps, or None.
        over_at: When it was over, in seconds since 1970; None while it is not, or cannot be.
    """

    kind: str
    title: str
    count: int
    first_at: float
    last_at: float
    what: str
    where: tuple[str, ...]
    replicas: tuple[int, ...]
    epoch: int | None
    batch: int | None
    advice: str
    command: str | None
    over_at: float | None = None


@dataclass(frozen=True)
class Place:
    """The place of a run, for command lines.

    Args:
        directory: The directory that the training was given; None if it is not known.
        run: The name of the run's folder.
    """

    directory: str | None = None
    run: str = ""

    def command(self, name: str, *options: str) -> str:
        """Returns a command line of `keras-distplug` for this run."""
        directory = "DIRECTORY" if self.directory is None else shlex.quote(self.directory)
        return " ".join(("keras-distplug", name, directory, *options))


def incidents(fits: Sequence[Fit], supervised: Sequence[Entry]) -> list[Incident]:
    """Returns everything that went wrong, oldest first, each once, although several workers may
    have reported it."""
    every = [
        (Incident(entry.at, entry.event, entry.source, what), where)
        for entry, where in (
            *((entry, (fit.began.session,)) for fit in fits for entry in fit.notable),
            *((entry, (entry.job, entry.attempt)) for entry in supervised),
        )
        if (what := in_words(entry.event)) is not None
    ]
    found: list[Incident] = []
    known: set[tuple[object, ...]] = set()
    is_over: dict[tuple[object, ...], bool] = {}  # by straggler
    for incident, where in sorted(every, key=lambda each: each[0].at):
        event = incident.event
        key = (*where, incident.what, getattr(event, "times", None))
        if isinstance(event, events.SlowReplica):
            # One straggler may be reported, and recover, several times.
            slow = (*where, *_likeness(event))
            is_known = is_over.get(slow, True) is event.is_over
            is_over[slow] = event.is_over
        else:
            is_known = key in known and not isinstance(event, events.UpdateLeftOut)
        if is_known:
            continue
        known.add(key)
        found.append(incident)
    return found


def grouped(found: Sequence[Incident], hosts: Mapping[str, str], place: Place) -> list[Group]:
    """Returns groups of equal incidents, the newest first.

    Args:
        found: As from `incidents`.
        hosts: Machines, by the names of their workers.
        place: The place of the run.
    """
    groups: dict[tuple[object, ...], Group] = {}
    for incident in found:
        event = incident.event
        key = (type(event), *_likeness(event))
        before = groups.get(key)
        if isinstance(event, events.SlowReplica) and event.is_over:
            if before is not None:
                groups[key] = replace(before, over_at=incident.at, advice="")
            continue
        # Old ones move to the end, so that the newest group is last.
        groups.pop(key, None)
        groups[key] = Group(
            kind=events.get_name(type(event)),
            title=_title(event),
            count=1 if before is None else before.count + 1,
            first_at=incident.at if before is None else before.first_at,
            last_at=incident.at,
            what=incident.what,
            where=_where(incident, hosts),
            replicas=_replicas(event),
            epoch=getattr(event, "epoch", None),
            batch=getattr(event, "batch", None),
            advice=_advice(event, place),
            command=_command(event, place),
        )
    return list(reversed(groups.values()))


def in_words(event: Event) -> str | None:
    """Returns what went wrong; None if nothing did."""
    match event:
        case (
            events.UpdateLeftOut(what=what)
            | events.Diverged(what=what)
            | events.SlowReplica(what=what)
            | events.Hung(what=what)
            | events.Failed(what=what)
            | events.StartedAgain(what=what)
            | events.Raised(what=what)
        ):
            return what
        case events.LinesLost():
            return f"{event.lines} lines of this log were lost"
        case events.RolledBack():
            return f"back to step {event.to_step}: {event.why}"
        case events.Quarantined():
            return f"{event.checkpoint} is quarantined: {event.why}"
        case events.SaveFailed():
            named = f"step {event.step} " in event.why
            return event.why if named else f"no checkpoint of step {event.step}: {event.why}"
        case events.Preempted():
            return f"{event.what} to {event.where}" if event.where else event.what
        case events.PeerLost():
            return f"lost {event.who}"
        case events.TrackerFailed():
            return f"{event.tracker} does not receive metrics: {event.why}"
        case _:
            return None


# How


def _likeness(event: Event) -> tuple[object, ...]:
    """Returns the values that equal incidents have in common."""
    match event:
        case events.UpdateLeftOut():
            return event.variable, _origin(event), event.replicas, event.score is None
        case events.SlowReplica():
            return event.cause, event.replica, event.rank
        case events.SaveFailed():
            return event.is_local, event.why
        case events.Failed():
            return event.worker, event.cause, event.exit_code
        case events.StartedAgain():
            return event.worker, event.cause
        case events.Diverged():
            return event.variable, event.replicas
        case events.RolledBack():
            return ()
        case events.Quarantined():
            return event.checkpoint, event.why
        case events.LinesLost():
            return ()
        case _:
            return (in_words(event),)


def _title(event: Event) -> str:
    match event:
        case events.UpdateLeftOut():
            return _title_of_update(event)
        case events.SlowReplica():
            slow = {"input": "Slow data", "network": "Slow network"}.get(event.cause, "Straggler")
            return f"{slow}: {event.where}"
        case events.SaveFailed():
            return f"{'Local checkpoint' if event.is_local else 'Checkpoint'} failed"
        case events.Failed():
            return f"{event.worker} failed (exit code {event.exit_code})"
        case events.StartedAgain():
            return f"{event.worker} was restarted"
        case events.Diverged():
            return f"Replicas differ in `{event.variable}`"
        case events.RolledBack():
            return f"Rolled back to step {event.to_step}"
        case events.Quarantined():
            return "Damaged checkpoint"
        case events.LinesLost():
            return "Lines of the log were lost"
        case events.Hung():
            return "Training hangs"
        case events.Preempted():
            return "Stopped by the user" if event.is_user else "Preempted"
        case events.PeerLost():
            return "A worker was lost"
        case events.TrackerFailed():
            return f"{event.tracker} does not receive metrics"
        case _:
            return "Training raised an error"


def _title_of_update(event: events.UpdateLeftOut) -> str:
    if event.score is not None:
        return "Update skipped: a spike of the loss or the gradients"
    place = _origin(event) or (
        f"`{event.variable}`" if event.variable else "the loss or a gradient"
    )
    values = [name for name in ("NaN", "Inf") if name in event.what]
    return f"{' or '.join(values) or 'NaN or Inf'} in {place}"


def _origin(event: events.UpdateLeftOut) -> str | None:
    """Returns the place of the first non-finite value, without the numbers that differ from one
    batch to the next: ``"the batch (`x`)"``."""
    if event.origin is None:
        return None
    place, _, rest = event.origin.partition(":")
    name = re.search(r"`[^`]+`", rest)
    return place if name is None else f"{place} ({name[0]})"


def _where(incident: Incident, hosts: Mapping[str, str]) -> tuple[str, ...]:
    match incident.event:
        case events.UpdateLeftOut(where=where) | events.Diverged(where=where) if where:
            return tuple(dict.fromkeys(_with_host(each, hosts) for each in where))
        case events.SlowReplica(where=where):
            return (_with_host(where, hosts),)
        case events.Failed(worker=worker) | events.StartedAgain(worker=worker):
            return (_with_host(worker, hosts),)
        case events.PeerLost(who=who):
            return (who,)
        case events.Preempted(where=where) if where:
            return (_with_host(where, hosts),)
    return () if incident.source == SUPERVISOR else (_with_host(incident.source, hosts),)


def _with_host(worker: str, hosts: Mapping[str, str]) -> str:
    """Returns `"worker-1 on node-1"`."""
    host = hosts.get(worker)
    return worker if host is None or " on " in worker else f"{worker} on {host}"


def _replicas(event: Event) -> tuple[int, ...]:
    if (replica := getattr(event, "replica", None)) is not None:
        return (replica,)
    return tuple(getattr(event, "replicas", ()) or ())


def _advice(event: Event, place: Place) -> str:
    folder = place.directory or "DIRECTORY"
    match event:
        case events.UpdateLeftOut(score=score) if score is not None:
            return "Look at the data of this batch. If it happens often, lower the learning rate."
        case events.UpdateLeftOut(is_transient=True):
            return (
                "Computed again, the batch gave finite values: suspect the hardware. Test the "
                "memory and the device of this machine."
            )
        case events.UpdateLeftOut():
            replica = f"-replica-{event.replicas[0]}" if event.replicas else ""
            batch = "" if event.batch is None else f"-batch-{event.batch + 1}"
            return (
                "Replay the batch to find the first non-finite value. Without a file name, the "
                "command takes the newest incident; the name of this one contains "
                f"epoch-{event.epoch + 1}{batch}{replica}."
            )
        case events.SlowReplica(cause="input"):
            return (
                "Its data arrives late: prefetch, cache, or use more parallel calls in `map`; look "
                f"at the disk and the network of {event.where}."
            )
        case events.SlowReplica(cause="network"):
            return f"Look at the network of {event.where}: link speed, errors, other traffic."
        case events.SlowReplica():
            return (
                f"Look at {event.where}: other processes (top, nvidia-smi), temperature and clock "
                "rates. If the machine is shared, move the worker."
            )
        case events.SaveFailed():
            return "Free disk space or fix the storage; until then, a restart repeats more steps."
        case events.Hung():
            return f"Read the stack traces of all workers, in {folder}/hangs."
        case events.Failed(exit_code=137):
            return "Look for the out-of-memory killer on this machine: dmesg | grep -i oom"
        case events.Failed():
            return "Read the end of this worker's output."
        case events.StartedAgain():
            return "Nothing, unless it happens again: the other workers continue."
        case events.Diverged():
            return (
                "Replicas no longer train the same model. Restart from the last checkpoint, and "
                "test the memory of these machines."
            )
        case events.RolledBack():
            return "See the skipped updates before it. Training continues."
        case events.Quarantined():
            return "Check the other checkpoints."
        case events.LinesLost():
            return "Free disk space or fix the storage of the log; training is not affected."
        case events.Preempted():
            return "Start the same command again: training resumes from the last checkpoint."
        case events.PeerLost():
            return "Read the end of the lost worker's output."
        case events.TrackerFailed():
            return "Check the tracker's server and credentials; training is not affected."
        case _:
            return "Fix the error, then start the same command again: training resumes."


def _command(event: Event, place: Place) -> str | None:
    match event:
        case events.UpdateLeftOut(score=None, is_transient=False):
            return place.command("replay")
        case events.Quarantined():
            return place.command("verify", "--deep")
    return None
