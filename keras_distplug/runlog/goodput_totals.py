"""The share of a run's time that was productive, and where the rest went.

Every second from the start of the first attempt falls into one `Category`. The share that is
`STEP`, updates computed for the first time, is the goodput, as in Google's "ML Productivity
Goodput". The time is measured on the chief: in synchronous training, the other workers wait with
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from keras_distplug.core.events import (
    LAST_WORDS,
    Beat,
    Began,
    Ended,
    Entry,
    Event,
    Failed,
    Finished,
    Hung,
    PeerLost,
    Preempted,
    Raised,
    RolledBack,
    Saved,
    Started,
    UpdateLeftOut,
    Window,
)
from keras_distplug.core.ledger import Category, split

_BEFORE_STEPS = (Category.START_UP, Category.RESTORE)
_CATEGORIES = frozenset(map(str, Category))
_OF_STEPS = (Category.STEP, Category.INPUT, Category.SYNC)
LATELY_MIN = (1, 5, 15)

Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True)
class Fit:
    """The log of one worker in one `fit`.

    Args:
        began: Its first event.
        entries: All of its entries, in order.
    """

    began: Began
    entries: tuple[Entry, ...]

    @property
    def source(self) -> str:
        return self.entries[0].source

    @cached_property
    def begins_at(self) -> float:
        """When its process started, or when the previous `fit` of that process ended."""
        for entry in self.entries:
            if isinstance(entry.event, Window):
                return entry.at - sum(entry.event.secs.values())
        return self.entries[0].at

    @cached_property
    def ends_at(self) -> float:
        """The time of its last entry."""
        return max(entry.at for entry in self.entries)

    @cached_property
    def notable(self) -> tuple[Entry, ...]:
        """The entries without windows and heartbeats, which are nearly all of them."""
        return tuple(each for each in self.entries if not isinstance(each.event, Window | Beat))

    @cached_property
    def last_step(self) -> int:
        # The last checkpoint of a worker that died may be newer than its last window.
        told = (each.event for each in self.entries)
        steps = [event.step for event in told if isinstance(event, Window | Saved | Beat)]
        return max((step for step in steps if step is not None), default=self.began.step)


@dataclass(frozen=True)
class Span:
    """The use of a stretch of time.

    Args:
        begin: Its start, in seconds since 1970.
        end: Its end, in seconds since 1970.
        secs: Seconds by category; their sum is the length of the stretch.
        attempt: The number of the attempt that it belongs to or follows, from 0.
        step: Batches trained since the run started, at its end.
    """

    begin: float
    end: float
    secs: Mapping[Category, float]
    attempt: int
    step: int


@dataclass(frozen=True)
class Attempt:
    """One `fit` of all workers.

    Args:
        number: 1 for the first attempt of the run, as in all output.
        begins_at: The start of the chief's process, in seconds since 1970.
        ends_at: The last entry of any of its workers, in seconds since 1970.
        workers: The number of workers.
        first_step: Its first step, in batches since the run started.
        last_step: Its last step.
        lost_steps: Steps that the next attempt repeated.
        lost_is_exact: False if there may be more: the log of a process that was killed ends before
            its last steps, which only a supervisor knows.
        end: The reason it ended, for people; None if that is not known.
        exit_code: The exit code of the worker that failed first; None if no supervisor has
            reported one.
    """

    number: int
    begins_at: float
    ends_at: float
    workers: int
    first_step: int
    last_step: int
    lost_steps: int
    lost_is_exact: bool
    end: str | None
    exit_code: int | None


class Timeline:
    """Converts the fits of one rank, one after the other, to spans.

    Args:
        begins_at: The start of the first one, in seconds since 1970.
    """

    def __init__(self, begins_at: float) -> None:
        self._at = begins_at
        self._gap = Category.START_UP  # the category of the time until the next `fit`
        self._number = -1
        self._step = self._furthest = 0
        self._lost = 0  # steps that counted as productive and were lost later
        self._left_out: list[int] = []

    def begin(self, begins_at: float, *, resumes: bool = True) -> Iterator[Span]:
        """Starts a `fit`.

        Args:
            begins_at: In seconds since 1970.
            resumes: Whether it may resume a run. Defaults to `True`.
        """
        yield from self.pause(begins_at)
        self._number += 1
        self._furthest = max(self._furthest, self._step) if resumes else 0
        self._lost = 0
        self._left_out.clear()

    def on_event(self, event: Event) -> None:
        """Counts skipped and rolled-back updates: the same number of the next steps makes up for
        them, like steps that an attempt repeats."""
        if isinstance(event, UpdateLeftOut):
            self._lost += 1
            self._left_out.append(self._step)
        elif isinstance(event, RolledBack):
            known = sum(step >= event.to_step for step in self._left_out)
            self._lost += max(0, self._step - event.to_step - known)
            self._left_out.clear()

    def take(self, at: float, window: Window) -> Iterator[Span]:
        """Adds a window."""
        if at <= self._at:  # a clock was set back
            self._step = window.step
            return
        secs = _of_length(window.secs, at - self._at)
        # Start-up and restore come before the steps in time, too.
        before = {each: secs.pop(each) for each in _BEFORE_STEPS if secs.get(each)}
        if before:
            yield self._span(
                min(self._at + sum(before.values()), at), before, window.step - window.steps
            )
        if at > self._at:
            redone = min(window.steps, max(0, self._furthest - (window.step - window.steps)))
            lost = min(window.steps - redone, self._lost)
            self._lost -= lost
            yield self._span(at, _with_redone(secs, window, redone + lost), window.step)
        self._step = window.step

    def end(self, *, is_left: bool) -> None:
        """Ends the `fit`.

        Args:
            is_left: Whether no restart is expected.
        """
        self._gap = Category.OTHER if is_left else Category.RECOVERY

    def pause(self, at: float) -> Iterator[Span]:
        """Fills the time until `at`."""
        if at > self._at:
            yield self._span(at, {self._gap: at - self._at}, self._step)

    def _span(self, at: float, secs: Mapping[Category, float], step: int) -> Span:
        begin, self._at = self._at, at
        return Span(begin, at, secs, max(self._number, 0), step)


def timeline(fits: Sequence[Fit], supervised: Sequence[Entry]) -> tuple[Timeline, list[Span]]:
    """Returns the timeline of some fits, and its spans so far.

    Args:
        fits: Fits of one rank, oldest first; at least one.
        supervised: The supervisors' events.
    """
    made = Timeline(min([fits[0].begins_at, *_find_times(supervised, fits[0], Started)]))
    found: list[Span] = []
    for fit in fits:
        found += made.begin(fit.begins_at, resumes=fit.began.resumes)
        for entry in fit.entries:
            if isinstance(entry.event, Window):
                found += made.take(entry.at, entry.event)
            else:
                made.on_event(entry.event)
        made.end(is_left=_has_left(fit))
    return made, found


def spans(fits: Sequence[Fit], supervised: Sequence[Entry] = ()) -> list[Span]:
    """Returns the time of one rank, from the start of its first attempt to its last entry.

    Args:
        fits: Fits of one rank, oldest first.
        supervised: The supervisors' events.
    """
    if not fits:
        return []
    made, found = timeline(fits, supervised)
    ends = _find_times(supervised, fits[-1], Ended)
    return [*found, *(made.pause(max(ends)) if ends else ())]


def totals(
    of: Iterable[Span], since: float = float("-inf"), until: float = float("inf")
) -> dict[Category, float]:
    """Returns the seconds of every category between two times. Spans count in proportion."""
    found = dict.fromkeys(Category, 0.0)
    for span in of:
        part_s = min(span.end, until) - max(span.begin, since)
        if part_s <= 0:
            continue
        share = part_s / (span.end - span.begin)
        for category, secs in span.secs.items():
            found[category] += share * secs
    return found


def goodput(secs: Mapping[Category, float]) -> float | None:
    """Returns the productive share, from 0 to 1; None for an empty time."""
    whole_s = sum(secs.values())
    return secs[Category.STEP] / whole_s if whole_s > 0 else None


def goodput_lately(of: Sequence[Span], begin: float, end: float) -> dict[int, float | None]:
    """Returns the goodput of the last minutes before `end`, by their number, unless they started
    before `begin`."""
    return {
        minutes: goodput(totals(of, end - 60 * minutes))
        for minutes in LATELY_MIN
        if end - begin > 60 * minutes
    }


def unknown_waits(fits: Iterable[Fit]) -> dict[Category, float]:
    """Returns the seconds of steps whose waiting time is not known, by the kind of waiting."""
    found = {Category.INPUT: 0.0, Category.SYNC: 0.0}
    for fit in fits:
        for entry in fit.entries:
            window = entry.event
            if not isinstance(window, Window) or window.step_s is None:
                continue
            secs = max(window.secs.get(Category.STEP, 0.0), 0.0)
            if window.input_s is None:
                found[Category.INPUT] += secs
            if fit.began.replicas > 1 and all(each.sync_s is None for each in window.replicas):
                found[Category.SYNC] += secs
    return {category: secs for category, secs in found.items() if secs}


def attempts(fits: Sequence[Fit], supervised: Sequence[Entry] = ()) -> list[Attempt]:
    """Returns all attempts, oldest first.

    Args:
        fits: The fits of all workers.
        supervised: The supervisors' events.
    """
    sessions: dict[str, list[Fit]] = {}
    for fit in sorted(fits, key=lambda each: each.begins_at):
        sessions.setdefault(fit.began.session, []).append(fit)
    groups = list(sessions.values())
    found = []
    for number, group in enumerate(groups):
        chief = min(group, key=lambda each: each.began.rank)
        following = groups[number + 1] if number + 1 < len(groups) else None
        again_from = None
        if following is not None:
            began = min(following, key=lambda each: each.began.rank).began
            again_from = began.step if began.resumes else None
        last_step = max(fit.last_step for fit in group)
        if following is not None:
            # The log of an attempt that was killed ends before its last steps.
            last_step = max(last_step, began.reached_before or 0)
        failure = _failure(supervised, chief)
        told_all = isinstance(chief.entries[-1].event, LAST_WORDS)
        found.append(
            Attempt(
                number=number + 1,
                begins_at=chief.begins_at,
                ends_at=max(fit.ends_at for fit in group),
                workers=chief.began.workers,
                first_step=chief.began.step,
                last_step=last_step,
                lost_steps=0 if again_from is None else max(0, last_step - again_from),
                lost_is_exact=again_from is None or began.reached_before is not None or told_all,
                end=_describe_end(group, failure),
                exit_code=None if failure is None else failure.exit_code,
            )
        )
    return found


def chiefs(fits: Iterable[Fit]) -> list[Fit]:
    """Returns the fits of rank 0, oldest first."""
    return select_rank(fits, 0)


def select_rank(fits: Iterable[Fit], rank: int) -> list[Fit]:
    return sorted((fit for fit in fits if fit.began.rank == rank), key=lambda fit: fit.begins_at)


def _find_times(supervised: Sequence[Entry], fit: Fit, kind: type[Event]) -> list[float]:
    """Returns the times of such events of the supervisor of `fit`, if it has one."""
    job = fit.entries[0].job
    return [
        entry.at
        for entry in supervised
        if job is not None and entry.job == job and isinstance(entry.event, kind)
    ]


def _of_length(secs: Mapping[str, float], length_s: float) -> dict[Category, float]:
    """Returns a window's time, shortened if it overlaps the previous one, for example because a
    clock was set."""
    found: dict[Category, float] = {}
    for name, value in secs.items():
        # A later release may have more categories.
        category = Category(name) if name in _CATEGORIES else Category.OTHER
        found[category] = found.get(category, 0.0) + max(value, 0.0)
    excess_s = sum(found.values()) - length_s
    for category in (Category.START_UP, Category.OTHER, *found):
        cut_s = min(max(excess_s, 0.0), found.get(category, 0.0))
        if cut_s:
            found[category] -= cut_s
            excess_s -= cut_s
    if excess_s < 0:
        found[Category.OTHER] = found.get(Category.OTHER, 0.0) - excess_s
    return found


def _with_redone(secs: dict[Category, float], window: Window, again: int) -> dict[Category, float]:
    if not again:
        return secs
    share = again / window.steps
    for category in _OF_STEPS:
        secs = split(secs, category, {Category.REDONE: share * secs.get(category, 0.0)})
    return secs


def _has_left(fit: Fit) -> bool:
    """True if no restart is expected."""
    told = _first([fit], Preempted)
    return (told is not None and told.is_user) or _first([fit], Finished) is not None


def _failure(supervised: Sequence[Entry], fit: Fit) -> Failed | None:
    job, attempt = fit.entries[0].job, fit.entries[0].attempt
    if job is None:
        return None
    told = (each.event for each in supervised if (each.job, each.attempt) == (job, attempt))
    return next((event for event in told if isinstance(event, Failed)), None)


def _describe_end(group: Sequence[Fit], failure: Failed | None) -> str | None:
    if _first(group, Finished):
        return "finished"
    if told := _first(group, Preempted):
        return f"{told.what} to {told.where}"
    if hung := _first(group, Hung):
        return f"hung: {hung.what}"
    # Errors of other workers may follow from that of the first one.
    causes = [fit for fit in group if failure is None or failure.worker == fit.source]
    if raised := _first(causes, Raised):
        return raised.what
    if failure is not None:
        return failure.what
    lost = _first(group, PeerLost)
    return None if lost is None else f"lost {lost.who}"


def _first(group: Sequence[Fit], kind: type[Kind]) -> Kind | None:
    found = (each.event for fit in group for each in fit.notable)
    return next((event for event in found if isinstance(event, kind)), None)
