"""The state that a run is in, judged by what its workers and its supervisor have logged."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keras_distplug.core import events
from keras_distplug.core.events import Beat, Entry, Event, Window
from keras_distplug.core.ledger import Category
from keras_distplug.runlog.goodput_totals import Fit
from keras_distplug.runlog.incident_groups import Group, in_words
from keras_distplug.runlog.run_progress import usual_step_secs

SILENT_SECS = 12.0  # two heartbeats, and some: the state is shown within 15 s
HEARD_SECS = 15.0
DEAD_SECS = 60.0
_LEAST_STALL_SECS = 7.0  # shown one heartbeat later
_USUAL_STEPS = 10  # a step that takes this many times the usual time is a stall
_SECOND_STEP_SECS = 60.0  # it may be traced, too
_OTHER_SECS = 120.0  # for callbacks between steps
_STARTING_SECS = 900.0


class State(enum.StrEnum):
    """The state of a run."""

    UNKNOWN = "unknown"
    STARTING = "starting"
    TRAINING = "training"
    SLOW = "slow"
    SILENT = "silent"
    STALLED = "stalled"
    RESTARTING = "restarting"
    DEAD = "dead"
    FAILED = "failed"
    STOPPED = "stopped"
    FINISHED = "finished"


ENDED = frozenset({State.DEAD, State.FAILED, State.STOPPED, State.FINISHED})
LEVELS: Mapping[State, str] = {
    State.UNKNOWN: "none",
    State.STARTING: "good",
    State.TRAINING: "good",
    State.SLOW: "warn",
    State.SILENT: "warn",
    State.STALLED: "bad",
    State.RESTARTING: "warn",
    State.DEAD: "bad",
    State.FAILED: "bad",
    State.STOPPED: "warn",
    State.FINISHED: "done",
}


class Clock:
    """Remembers when the next of the times that were asked for comes."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.until = math.inf

    def is_past(self, at: float) -> bool:
        if self.now >= at:
            return True
        self.until = min(self.until, at)
        return False


@dataclass(frozen=True)
class Finding:
    state: State
    since: float | None
    cause: str
    where: tuple[str, ...] = ()


class Run:
    """A run at a point in time."""

    def __init__(
        self, fits: Sequence[Fit], supervised: Sequence[Entry], clock: Clock, delay_secs: float
    ) -> None:
        self._clock = clock
        self._delay_secs = delay_secs
        last = max(fits, key=lambda fit: fit.begins_at, default=None)
        session = None if last is None else last.began.session
        self.group = [fit for fit in fits if fit.began.session == session]  # the last attempt
        self.chief = min(self.group, key=lambda fit: fit.began.rank, default=None)
        self.suspect: Fit | None = None  # the one worker that holds up the others
        self.hosts = {fit.source: fit.began.host for fit in fits}
        self.heard_at = max((fit.ends_at for fit in self.group), default=None)
        job = self.group[0].entries[0].job if self.group else None
        newest = max(supervised, key=lambda entry: entry.at, default=None)
        began_at = max((fit.entries[0].at for fit in self.group), default=-math.inf)
        # What a supervisor said before the last `fit` started is over.
        self._supervised = [
            entry
            for entry in supervised
            if entry.at > began_at or (newest is not None and entry.job == job == newest.job)
        ]
        self.said = [entry for entry in self._supervised if entry.at > began_at]
        ended = [entry for entry in self._supervised if isinstance(entry.event, events.Ended)]
        self.is_supervised = (bool(self._supervised) or job is not None) and not ended

    def finding(self) -> Finding:
        return self._from_supervisor() or self._from_workers()

    def heard_level(self, state: State) -> str:
        if state in ENDED or self.heard_at is None:
            return "bad" if state in (State.DEAD, State.FAILED) else "none"
        if state is State.RESTARTING or self._is_past(self.heard_at + DEAD_SECS):
            return "bad"
        return "warn" if self._is_past(self.heard_at + HEARD_SECS) else "good"

    def current(self, groups: Sequence[Group]) -> list[Group]:
        """Returns the groups of incidents that have occurred in the last attempt."""
        since = -math.inf if self.chief is None else self.chief.begins_at
        return [group for group in groups if group.last_at >= since]

    def with_host(self, worker: str) -> str:
        host = self.hosts.get(worker)
        return worker if host is None or " on " in worker else f"{worker} on {host}"

    # The supervisor's events

    def _from_supervisor(self) -> Finding | None:
        if not self.said:
            return None
        last = self.said[-1]
        failed = self._last(events.Failed)
        why, where = "", tuple[str, ...]()
        if failed is not None and isinstance(failed.event, events.Failed):
            why, where = self._why(failed.event), (self.with_host(failed.event.worker),)
        match last.event:
            case events.Failed():
                if self._clock.is_past(last.at + _STARTING_SECS):
                    self.is_supervised = False  # the supervisor is gone, too
                return Finding(State.DEAD, last.at, why, where)
            case events.Again() | events.Started():
                if self._clock.is_past(last.at + _STARTING_SECS):
                    self.is_supervised = False
                    what = "the supervisor started the workers, and none has started to train since"
                    return Finding(State.DEAD, last.at, what, where)
                if failed is None and not self.group:
                    return Finding(State.STARTING, last.at, "the workers are being started")
                pause = getattr(last.event, "pause_secs", 0.0)
                pause = f" after a pause of {pause:.0f} s" if pause else ""
                what = f"restarted{pause} because {why}" if why else f"restarted{pause}"
                return Finding(
                    State.RESTARTING, last.at if failed is None else failed.at, what, where
                )
            case events.Ended(exit_code=code, why=text) if code:
                what = "; ".join(filter(None, (why, text))) or f"exit code {code}"
                return Finding(State.FAILED, last.at, what, where)
        return None

    def _why(self, failed: events.Failed) -> str:
        """Returns the supervisor's reason with the worker's error, which only the log has."""
        raised = [
            entry.event.what
            for fit in self.group
            for entry in fit.notable
            if fit.source == failed.worker and isinstance(entry.event, events.Raised)
        ]
        return f"{failed.what}: {raised[0]}" if raised else failed.what

    def _last(self, kind: type[Event]) -> Entry | None:
        found = [entry for entry in self._supervised if isinstance(entry.event, kind)]
        return found[-1] if found else None

    # The workers' events

    def _from_workers(self) -> Finding:
        if self.chief is None or self.heard_at is None:
            return Finding(State.UNKNOWN, None, "no worker has written a log yet")
        if (ended := self._end()) is not None:
            return ended
        if self._is_past(self.heard_at + DEAD_SECS):
            self.is_supervised = False  # or it would have reported this
            return Finding(State.DEAD, self.heard_at, self._silence(), self._all_workers())
        if (stalled := self._hang() or self._stall()) is not None:
            return stalled
        if self._is_past(self.heard_at + SILENT_SECS):
            return Finding(State.SILENT, self.heard_at, self._silence(), self._all_workers())
        if not any(isinstance(each.event, Window) for each in self.chief.entries):
            what = "the first step is being prepared: tracing, compiling, reading data"
            return Finding(State.STARTING, self.chief.begins_at, what)
        first = next(e.at for e in self.chief.entries if isinstance(e.event, Window))
        doing = _doing(self.chief)
        what = "validating" if doing == Category.EVALUATION else "steps are being trained"
        return Finding(State.TRAINING, first, what)

    def _end(self) -> Finding | None:
        """Returns the end of the last attempt, as its workers have logged it."""
        ends: list[tuple[Entry, Fit]] = [
            (entry, fit)
            for fit in self.group
            for entry in fit.notable
            if isinstance(
                entry.event, events.Finished | events.Preempted | events.PeerLost | events.Raised
            )
        ]
        for kind, state in (
            (events.Finished, State.FINISHED),
            (events.Preempted, State.STOPPED),
            (events.Raised, State.FAILED),
            (events.PeerLost, State.DEAD),
        ):
            found = [(entry, fit) for entry, fit in ends if isinstance(entry.event, kind)]
            if not found:
                continue
            entry, fit = min(found, key=lambda each: each[0].at)
            what = in_words(entry.event) or _finish(entry.event)
            where: tuple[str, ...] = (self.with_host(fit.source),)
            if isinstance(entry.event, events.PeerLost):
                where = (entry.event.who,)
            elif state in (State.FINISHED, State.STOPPED):
                where = ()
            if state is State.FAILED and self.is_supervised:
                state = State.DEAD  # until the supervisor has decided
            return Finding(state, entry.at, what, where)
        return None

    def _hang(self) -> Finding | None:
        """Returns the hang that `HangWatchdog` has reported, unless steps were trained since."""
        found = [
            (entry, fit)
            for fit in self.group
            for entry in fit.notable
            if isinstance(entry.event, events.Hung)
        ]
        if not found or self.chief is None:
            return None
        entry, fit = min(found, key=lambda each: each[0].at)
        trained = any(
            isinstance(each.event, Window) and each.event.steps and each.at > entry.at
            for each in self.chief.entries
        )
        if trained:
            return None
        return Finding(
            State.STALLED, entry.at, in_words(entry.event) or "", (self.with_host(fit.source),)
        )

    def _stall(self) -> Finding | None:
        """Returns a stall: heartbeats arrive, but no step finishes."""
        assert self.chief is not None
        last = self.chief.entries[-1]
        beat = last.event
        if not isinstance(beat, Beat) or beat.idle_s is None or beat.idle_s < self._patience(beat):
            return None
        since = last.at - beat.idle_s
        busy = [fit for fit in self.group if _is_elsewhere(fit)]
        silent = [fit for fit in self.group if fit.ends_at < (self.heard_at or 0.0) - SILENT_SECS]
        if silent:
            self.suspect = silent[0] if len(silent) == 1 else None
            names = tuple(self.with_host(fit.source) for fit in silent)
            return Finding(State.STALLED, since, f"no log entries from {_list(names)}", names)
        doing = _DOING.get(beat.doing or "", "callbacks")
        names = tuple(self.with_host(fit.source) for fit in busy)
        self.suspect = (busy or self.group)[0] if len(busy) == 1 or len(self.group) == 1 else None
        if names and len(busy) < len(self.group):
            what = f"{_list(names)} is not in a training step, and the other workers wait for it"
            return Finding(State.STALLED, since, what, names)
        what = f"the processes are alive, and no step has finished ({doing})"
        return Finding(State.STALLED, since, what, names or self._all_workers())

    def _patience(self, beat: Beat) -> float:
        """Returns how long the chief may go without finishing a step."""
        assert self.chief is not None
        usual_s = usual_step_secs(self.chief)
        match beat.doing:
            case Category.STEP:
                return (
                    _SECOND_STEP_SECS
                    if usual_s is None
                    else max(_LEAST_STALL_SECS, _USUAL_STEPS * usual_s)
                )
            case Category.START_UP | Category.RESTORE:
                return _STARTING_SECS
            case Category.EVALUATION:
                return math.inf  # HangWatchdog has a limit
            case _:
                return max(_OTHER_SECS, _USUAL_STEPS * (usual_s or 0.0))

    def _silence(self) -> str:
        return "no worker has written to the log since"

    def _all_workers(self) -> tuple[str, ...]:
        names = tuple(self.with_host(fit.source) for fit in self.group)
        return names if len(names) <= 4 else (f"all {len(names)} workers",)

    def _is_past(self, at: float) -> bool:
        return self._clock.is_past(at + self._delay_secs)


_DOING: Mapping[str, str] = {
    Category.STEP: "in a training step, waiting for data, devices or other workers",
    Category.START_UP: "before the first step",
    Category.OTHER: "between two steps: in callbacks, or at the end of an epoch",
}


def _doing(fit: Fit) -> str | None:
    event = fit.entries[-1].event
    return event.doing if isinstance(event, Beat) else None


def _is_elsewhere(fit: Fit) -> bool:
    """True if the last heartbeat of a worker says that it is not in a training step."""
    return _doing(fit) not in (None, Category.STEP, Category.START_UP)


def _finish(event: Event) -> str:
    if not isinstance(event, events.Finished):
        return ""
    early = ", stopped early by a callback" if event.stopped_early else ""
    return f"all {event.epochs} epochs are trained{early}" if not early else f"trained{early}"


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:3])} and others"
