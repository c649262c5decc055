"""A run as a page shows it: numbers, in a size that does not grow with the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keras_distplug.core import events
from keras_distplug.core.events import Entry, Event, Window
from keras_distplug.core.ledger import Category
from keras_distplug.runlog import goodput_totals, replicas_shown
from keras_distplug.runlog.goodput_totals import Fit, Span
from keras_distplug.runlog.replicas_shown import BINS
from keras_distplug.storage.survey import Looked

_MOST_EVENTS = 200
_LATELY_S = 180.0  # somebody who was heard of since then is still there
_STARTING_S = 900.0  # as long as a start may take


def headline(
    name: str,
    fits: Sequence[Fit],
    supervised: Sequence[Entry],
    now: float,
    checkpoints: Mapping[int, Looked] | None = None,
) -> dict[str, Any]:
    """What tells a run from others; JSON-able. It changes with `now` in its state alone.

    Args:
        name: The run's.
        fits: What its workers have told.
        supervised: What supervisors have.
        now: Seconds since 1970.
        checkpoints: Those that are there, by their steps; None if nobody has looked.
    """
    spans = _spans(fits, supervised)
    begin, end = _range(fits, supervised, spans)
    attempts = goodput_totals.attempts(fits, supervised)
    there = [each for each in _saved(fits, checkpoints) if each["state"] == "committed"]
    last = next((each for each in reversed(there) if each["verified"]), None)
    newer = there[-1] if there and there[-1] is not last else None
    return {
        "name": name,
        "begin": begin,
        "end": end,
        "state": _state(fits, attempts, supervised, now),
        "step": max([span.step for span in spans] or [fit.last_step for fit in fits], default=0),
        "goodput": goodput_totals.goodput(goodput_totals.totals(spans)),
        "goodput_lately": {
            str(minutes): share
            for minutes, share in goodput_totals.goodput_lately(spans, begin, end).items()
        },
        "attempted": len(attempts),
        "last_checkpoint": last and {key: last[key] for key in ("at", "step", "verified")},
        "newer_checkpoint": newer and {key: newer[key] for key in ("at", "step")},
    }


def summary(
    name: str,
    fits: Sequence[Fit],
    supervised: Sequence[Entry],
    now: float,
    checkpoints: Mapping[int, Looked] | None = None,
) -> dict[str, Any]:
    """All that is shown of a run: its `headline`, which takes the same, and more."""
    spans = _spans(fits, supervised)
    begin, end = _range(fits, supervised, spans)
    return {
        **headline(name, fits, supervised, now, checkpoints),
        "secs": {str(category): value for category, value in goodput_totals.totals(spans).items()},
        "unknown_waits": {
            str(category): value
            for category, value in goodput_totals.unknown_waits(goodput_totals.chiefs(fits)).items()
        },
        "attempts": [
            _attempt(each) for each in goodput_totals.attempts(fits, supervised)[-_MOST_EVENTS:]
        ],
        "area": _area(spans, begin, end),
        "heat": replicas_shown.heat(fits, begin, end),
        "ranking": replicas_shown.ranking(fits),
        "checkpoints": _saved(fits, checkpoints)[-_MOST_EVENTS:],
        "incidents": _incidents(fits, supervised)[-_MOST_EVENTS:],
    }


def _spans(fits: Sequence[Fit], supervised: Sequence[Entry]) -> list[Span]:
    return goodput_totals.spans(goodput_totals.chiefs(fits), supervised)


def _range(
    fits: Sequence[Fit], supervised: Sequence[Entry], spans: Sequence[Span]
) -> tuple[float, float]:
    """What charts show; the same as long as nothing new is known."""
    if spans:
        return spans[0].begin, spans[-1].end
    told = [
        entry.at for entries in (*(fit.entries for fit in fits), supervised) for entry in entries
    ]
    return min(told, default=0.0), max(told, default=0.0)


def _state(
    fits: Sequence[Fit],
    attempts: Sequence[goodput_totals.Attempt],
    supervised: Sequence[Entry],
    now: float,
) -> str:
    begun_at = max((fit.entries[0].at for fit in fits), default=float("-inf"))
    last_told = max(supervised, key=lambda entry: entry.at, default=None)
    if last_told is not None and last_told.at > begun_at:
        match last_told.event:
            case events.Failed(what=what):
                return what
            case events.Again() | events.Started():
                is_late = now - last_told.at > _STARTING_S
                return "not heard of any more" if is_late else "being started"
            case events.Ended(exit_code=code, why=why) if code:
                return why or f"ended with {code}"
    if not attempts:
        return "nothing is known yet"
    last = attempts[-1]
    if last.end is not None:
        return last.end
    silent_s = now - max(fit.ends_at for fit in fits)
    return "training" if silent_s < _LATELY_S else "not heard of any more"


def _attempt(attempt: goodput_totals.Attempt) -> dict[str, Any]:
    return {
        "number": attempt.number,
        "begin": attempt.begins_at,
        "end": attempt.ends_at,
        "workers": attempt.workers,
        "first_step": attempt.first_step,
        "last_step": attempt.last_step,
        "lost_steps": attempt.lost_steps,
        "cause": attempt.end,
        "exit_code": attempt.exit_code,
    }


def _area(spans: Sequence[Span], begin: float, end: float) -> dict[str, Any]:
    """The share of each category in each stretch of time."""
    width = (end - begin) / BINS or 1.0  # a run that has only begun has no length
    bins = [dict.fromkeys(Category, 0.0) for _ in range(BINS)]
    for span in spans:
        first = int((span.begin - begin) / width)
        last = min(int((span.end - begin) / width), BINS - 1)
        for number in range(first, last + 1):
            left = begin + number * width
            part_s = min(span.end, left + width) - max(span.begin, left)
            if part_s <= 0:
                continue
            share = part_s / (span.end - span.begin)
            for category, value in span.secs.items():
                bins[number][category] += share * value
    return {
        "width": width,
        "shares": {
            str(category): [round(each[category] / width, 4) for each in bins]
            for category in Category
            if any(each[category] for each in bins)
        },
    }


def _saved(fits: Sequence[Fit], looked: Mapping[int, Looked] | None) -> list[dict[str, Any]]:
    """Checkpoints, and what is known of them: where nobody has looked, what the log says."""
    found: list[dict[str, Any]] = []
    for fit in goodput_totals.chiefs(fits):
        for entry in fit.entries:
            event = entry.event
            if isinstance(event, events.Saved):
                found.append(_row(entry.at, event, looked))
            elif isinstance(event, events.SaveFailed):
                found.append(
                    {
                        "at": entry.at,
                        "step": event.step,
                        "secs": None,
                        "stall_secs": None,
                        "bytes": None,
                        "tier": "local" if event.is_local else "shared",
                        "state": f"failed: {event.why}",
                        "verified": None,
                    }
                )
            elif isinstance(event, events.Restored):
                _read_back(found, event)
    return found


def _row(at: float, event: events.Saved, looked: Mapping[int, Looked] | None) -> dict[str, Any]:
    seen = Looked("committed", False)
    if looked is not None and not event.is_local:  # a worker's own disk is not to be seen from here
        seen = looked.get(event.step, Looked("replaced", False))
    return {
        "at": at,
        "step": event.step,
        "secs": event.secs,
        "stall_secs": event.stall_secs,
        "bytes": event.checkpoint_bytes,
        "tier": "local" if event.is_local else "shared",
        "state": seen.state,
        "verified": "sizes" if seen.has_sizes else None,
    }


def _read_back(saved: Sequence[dict[str, Any]], event: events.Restored) -> None:
    """Who takes a checkpoint up compares all its bytes with what was committed."""
    tier = "local" if event.is_local else "shared"
    for each in reversed(saved):
        if (each["step"], each["tier"]) == (event.step, tier):
            if each["state"] == "committed":
                each["verified"] = "read back"
            return


def _incidents(fits: Sequence[Fit], supervised: Sequence[Entry]) -> list[dict[str, Any]]:
    """All that was not as it should be, each once, though several workers may tell of it."""
    found: list[dict[str, Any]] = []
    known: set[tuple[Any, ...]] = set()
    every = [
        (entry, where, what)
        for entry, where in (
            *((entry, (fit.began.session,)) for fit in fits for entry in fit.entries),
            *((entry, (entry.job, entry.attempt)) for entry in supervised),
        )
        if not isinstance(entry.event, Window) and (what := told(entry.event)) is not None
    ]
    for entry, where, what in sorted(every, key=lambda each: each[0].at):
        event = entry.event
        key = (*where, what, getattr(event, "times", None))
        if key in known and not isinstance(event, events.UpdateLeftOut):
            continue
        known.add(key)
        replica = getattr(event, "replica", None)
        found.append(
            {
                "at": entry.at,
                "kind": events.name_of(type(event)),
                "what": what,
                "source": entry.source,
                "replicas": list(getattr(event, "replicas", ()) or ())
                if replica is None
                else [replica],
                "variable": getattr(event, "variable", None),
                "epoch": getattr(event, "epoch", None),
                "batch": getattr(event, "batch", None),
            }
        )
    return found


def told(event: Event) -> str | None:
    """What was not as it should be, in words; None if all was."""
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
            return f"{event.checkpoint} is set aside: {event.why}"
        case events.SaveFailed():
            return f"no checkpoint of step {event.step}: {event.why}"
        case events.Preempted():
            return f"{event.what} to {event.where}"
        case events.PeerLost():
            return f"lost {event.who}"
        case events.TrackerFailed():
            return f"{event.tracker} does not receive metrics: {event.why}"
        case _:
            return None
