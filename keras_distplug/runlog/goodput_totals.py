"""What share of a run's time trained it, and where the rest went.

Every second from the start of the first attempt falls into one `Category`. The share that is
`STEP`, updates that were computed for the first time, is the goodput, as in Google's "ML
Productivity Goodput". The time of a run is that of its chief: in synchronous training the others
wait with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from keras_distplug.core.events import (
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
    """What one worker has told in one `fit`.

    Args:
        began: Its beginning.
        entries: All that it has told, in order.
    """

    began: Began
    entries: tuple[Entry, ...]

    @property
    def source(self) -> str:
        return self.entries[0].source

    @cached_property
    def begins_at(self) -> float:
        """When its process was started, or the `fit` before in it had ended."""
        for entry in self.entries:
            if isinstance(entry.event, Window):
                return entry.at - sum(entry.event.secs.values())
        return self.entries[0].at

    @cached_property
    def ends_at(self) -> float:
        """When it was last heard of."""
        return max(entry.at for entry in self.entries)

    @cached_property
    def notable(self) -> tuple[Entry, ...]:
        """The entries without windows and heartbeats, which are nearly all of them."""
        return tuple(each for each in self.entries if not isinstance(each.event, Window | Beat))

    @cached_property
    def last_step(self) -> int:
        # A checkpoint may be of a step behind the last window of a worker that died.
        told = (each.event for each in self.entries)
        steps = [event.step for event in told if isinstance(event, Window | Saved)]
        return max(steps, default=self.began.step)


@dataclass(frozen=True)
class Span:
    """What a stretch of time went to.

    Args:
        begin: In seconds since 1970.
        end: The same.
        secs: By category; their sum is the whole stretch.
        attempt: Number of the attempt that it is of, or that it follows, from 0.
        step: Batches trained since the run began, at its end.
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
        number: The first attempt of the run is 1, as in all that is printed.
        begins_at: When the chief's process was started.
        ends_at: When the last of its workers was last heard of.
        workers: How many.
        first_step: With which it began; batches since the run began.
        last_step: With which it ended.
        lost_steps: Of these, how many the next attempt had to train again.
        end: How it ended, for people; `None` if nothing is known of that.
        exit_code: Of the worker that failed first; None if no supervisor has told.
    """

    number: int
    begins_at: float
    ends_at: float
    workers: int
    first_step: int
    last_step: int
    lost_steps: int
    end: str | None
    exit_code: int | None


class Timeline:
    """Puts what one worker's place has told, `fit` for `fit`, one after the other.

    Args:
        begins_at: In seconds since 1970.
    """

    def __init__(self, begins_at: float) -> None:
        self._at = begins_at
        self._gap = Category.START_UP  # what the time up to the next `fit` goes to
        self._number = -1
        self._step = self._furthest = 0
        self._lost = 0  # steps that counted, and turned out to be for nothing
        self._left_out: list[int] = []

    def begin(self, begins_at: float, *, resumes: bool = True) -> Iterator[Span]:
        """A `fit` begins.

        Args:
            begins_at: In seconds since 1970.
            resumes: Whether it may be one of a run that goes on.
        """
        yield from self.pause(begins_at)
        self._number += 1
        self._furthest = max(self._furthest, self._step) if resumes else 0
        self._lost = 0
        self._left_out.clear()

    def hear(self, event: Event) -> None:
        """An update was left out, or some were rolled back: so many of the next steps make up for
        them, as where an attempt trains again what another one had trained."""
        if isinstance(event, UpdateLeftOut):
            self._lost += 1
            self._left_out.append(self._step)
        elif isinstance(event, RolledBack):
            known = sum(step >= event.to_step for step in self._left_out)
            self._lost += max(0, self._step - event.to_step - known)
            self._left_out.clear()

    def take(self, at: float, window: Window) -> Iterator[Span]:
        """A window of it has ended."""
        if at <= self._at:  # a clock was set back
            self._step = window.step
            return
        secs = _of_length(window.secs, at - self._at)
        # What comes before the first step does so in time, too.
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
        """It is over.

        Args:
            is_left: Whether nobody waits for it to go on.
        """
        self._gap = Category.OTHER if is_left else Category.RECOVERY

    def pause(self, at: float) -> Iterator[Span]:
        """Nothing comes until `at`."""
        if at > self._at:
            yield self._span(at, {self._gap: at - self._at}, self._step)

    def _span(self, at: float, secs: Mapping[Category, float], step: int) -> Span:
        begin, self._at = self._at, at
        return Span(begin, at, secs, max(self._number, 0), step)


def timeline(fits: Sequence[Fit], supervised: Sequence[Entry]) -> tuple[Timeline, list[Span]]:
    """That of some attempts, and what it holds by then.

    Args:
        fits: Of one worker's place, such as those of rank 0, from the first to the last; at least
            one.
        supervised: What supervisors have told.
    """
    made = Timeline(min([fits[0].begins_at, *_told_at(supervised, fits[0], Started)]))
    found: list[Span] = []
    for fit in fits:
        found += made.begin(fit.begins_at, resumes=fit.began.resumes)
        for entry in fit.entries:
            if isinstance(entry.event, Window):
                found += made.take(entry.at, entry.event)
            else:
                made.hear(entry.event)
        made.end(is_left=_has_left(fit))
    return made, found


def spans(fits: Sequence[Fit], supervised: Sequence[Entry] = ()) -> list[Span]:
    """The time of one worker's place, from the start of its first attempt to what is known last.

    Args:
        fits: As for `timeline`, or none.
        supervised: What supervisors have told.
    """
    if not fits:
        return []
    made, found = timeline(fits, supervised)
    ends = _told_at(supervised, fits[-1], Ended)
    return [*found, *(made.pause(max(ends)) if ends else ())]


def totals(
    of: Iterable[Span], since: float = float("-inf"), until: float = float("inf")
) -> dict[Category, float]:
    """Seconds of each category between two moments; of a span that is cut, its share."""
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
    """The productive share, from 0 to 1; None of no time at all."""
    whole_s = sum(secs.values())
    return secs[Category.STEP] / whole_s if whole_s > 0 else None


def goodput_lately(of: Sequence[Span], begin: float, end: float) -> dict[int, float | None]:
    """That of the last minutes before `end`, by how many they are, as far as `begin` is before."""
    return {
        minutes: goodput(totals(of, end - 60 * minutes))
        for minutes in LATELY_MIN
        if end - begin > 60 * minutes
    }


def unknown_waits(fits: Iterable[Fit]) -> dict[Category, float]:
    """Seconds of steps, of which it is not known how much of them went to what; none if it is."""
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
    """What became of each attempt.

    Args:
        fits: Of all workers.
        supervised: What supervisors have told.
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
        found.append(
            Attempt(
                number=number + 1,
                begins_at=chief.begins_at,
                ends_at=max(fit.ends_at for fit in group),
                workers=chief.began.workers,
                first_step=chief.began.step,
                last_step=last_step,
                lost_steps=0 if again_from is None else max(0, last_step - again_from),
                end=_end_of(group, failure),
                exit_code=None if failure is None else failure.exit_code,
            )
        )
    return found


def chiefs(fits: Iterable[Fit]) -> list[Fit]:
    """Those of rank 0, from the first to the last."""
    return of_rank(fits, 0)


def of_rank(fits: Iterable[Fit], rank: int) -> list[Fit]:
    return sorted((fit for fit in fits if fit.began.rank == rank), key=lambda fit: fit.begins_at)


def _told_at(supervised: Sequence[Entry], fit: Fit, kind: type[Event]) -> list[float]:
    """When the supervisor of `fit`, if it has one, told of such events."""
    job = fit.entries[0].job
    return [
        entry.at
        for entry in supervised
        if job is not None and entry.job == job and isinstance(entry.event, kind)
    ]


def _of_length(secs: Mapping[str, float], length_s: float) -> dict[Category, float]:
    """Of a window that overlaps what is accounted for, such as by another clock, the rest."""
    found: dict[Category, float] = {}
    for name, value in secs.items():
        # A later release may know more of them.
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
    """Whether nobody is waiting for it to go on."""
    told = _first([fit], Preempted)
    return (told is not None and told.is_user) or _first([fit], Finished) is not None


def _failure(supervised: Sequence[Entry], fit: Fit) -> Failed | None:
    job, attempt = fit.entries[0].job, fit.entries[0].attempt
    if job is None:
        return None
    told = (each.event for each in supervised if (each.job, each.attempt) == (job, attempt))
    return next((event for event in told if isinstance(event, Failed)), None)


def _end_of(group: Sequence[Fit], failure: Failed | None) -> str | None:
    if _first(group, Finished):
        return "finished"
    if told := _first(group, Preempted):
        return f"{told.what} to {told.where}"
    if hung := _first(group, Hung):
        return f"hung: {hung.what}"
    # Another worker's error may follow from that of the one that failed first.
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
