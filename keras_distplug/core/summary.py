"""A run as a page shows it: numbers, in a size that does not grow with the run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from keras_distplug.core import events, goodput
from keras_distplug.core.events import Entry, Event, Window
from keras_distplug.core.goodput import Fit, Span
from keras_distplug.core.ledger import Category

_BINS = 240  # of time
_NOTHING = -1.0
_MOST_EVENTS = 200
_LATELY_S = 180.0  # somebody who was heard of since then is still there
_STARTING_S = 900.0  # as long as a start may take
_MINUTES = (1, 5, 15)


def summary(
    name: str,
    fits: Sequence[Fit],
    supervised: Sequence[Entry],
    now: float,
    checkpoints: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """What is shown of a run; JSON-able.

    Args:
        name: The run's.
        fits: What its workers have told.
        supervised: What supervisors have.
        now: Seconds since 1970.
        checkpoints: The state of each checkpoint that is there, by its step; None if nobody has
            looked.
    """
    spans = goodput.spans(goodput.chiefs(fits), supervised)
    attempts = goodput.attempts(fits, supervised)
    secs = goodput.totals(spans)
    begin, end = (spans[0].begin, spans[-1].end) if spans else (now, now)
    saved = _saved(fits, checkpoints)
    return {
        "name": name,
        "now": now,
        "begin": begin,
        "end": end,
        "state": _state(fits, attempts, supervised, now),
        "step": max((span.step for span in spans), default=0),
        "goodput": goodput.goodput(secs),
        "goodput_lately": {
            str(minutes): goodput.goodput(goodput.totals(spans, end - 60 * minutes))
            for minutes in _MINUTES
            if end - begin > 60 * minutes
        },
        "secs": {str(category): value for category, value in secs.items()},
        "attempts": [_attempt(each) for each in attempts],
        "area": _area(spans, begin, end),
        "heat": _heat(fits, begin, end),
        "ranking": _ranking(fits),
        "checkpoints": saved[-_MOST_EVENTS:],
        "last_checkpoint": next((each for each in reversed(saved) if _counts(each)), None),
        "incidents": _incidents(fits, supervised)[-_MOST_EVENTS:],
    }


def _state(
    fits: Sequence[Fit],
    attempts: Sequence[goodput.Attempt],
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


def _attempt(attempt: goodput.Attempt) -> dict[str, Any]:
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
    width = (end - begin) / _BINS or 1.0
    bins = [dict.fromkeys(Category, 0.0) for _ in range(_BINS)]
    for span in spans:
        first = int((span.begin - begin) / width)
        last = min(int((span.end - begin) / width), _BINS - 1)
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


def _heat(fits: Sequence[Fit], begin: float, end: float) -> dict[str, Any]:
    """What each replica had in each stretch of time: of several windows, the largest."""
    width = (end - begin) / _BINS or 1.0
    found: dict[tuple[str, int], list[float]] = {}
    where: dict[int, str] = {}
    for fit in fits:
        worker = f"{fit.source} on {fit.began.host}"
        for entry in fit.entries:
            window = entry.event
            if not isinstance(window, Window) or not window.replicas:
                continue
            last = min(int((entry.at - begin) / width), _BINS - 1)
            first = max(int((entry.at - sum(window.secs.values()) - begin) / width), 0)
            for each in window.replicas:
                where[each.replica] = worker
                for what, value in (
                    ("compute", each.compute_s),
                    ("sync", each.sync_s),
                    ("input", window.input_s),
                ):
                    if value is None:
                        continue
                    if (cells := found.get((what, each.replica))) is None:
                        cells = found[what, each.replica] = [_NOTHING] * _BINS
                    for number in range(first, last + 1):
                        if cells[number] < value:
                            cells[number] = value
    rows = sorted(where)
    nothing = [_NOTHING] * _BINS
    return {
        "width": width,
        "rows": [{"replica": row, "where": where[row]} for row in rows],
        "milliseconds": {
            what: [
                [
                    None if cell == _NOTHING else round(1000 * cell, 3)
                    for cell in found.get((what, row), nothing)
                ]
                for row in rows
            ]
            for what in ("compute", "sync", "input")
            if any(known == what for known, _ in found)
        },
    }


def _ranking(fits: Sequence[Fit]) -> list[dict[str, Any]]:
    """Replicas of the last attempt, the slowest first."""
    if not fits:
        return []
    session = max(fits, key=lambda fit: fit.begins_at).began.session
    compute: dict[int, list[tuple[int, float]]] = {}
    where: dict[int, str] = {}
    told: dict[int, set[str]] = {}
    for fit in fits:
        if fit.began.session != session:
            continue
        for entry in fit.entries:
            if isinstance(entry.event, Window):
                for each in entry.event.replicas:
                    where[each.replica] = f"{entry.source} on {fit.began.host}"
                    compute.setdefault(each.replica, []).append((entry.event.steps, each.compute_s))
            elif isinstance(entry.event, events.SlowReplica) and not entry.event.is_over:
                told.setdefault(entry.event.rank, set()).add(entry.event.cause)
    means = {
        replica: sum(n * s for n, s in each) / max(sum(n for n, _ in each), 1)
        for replica, each in compute.items()
    }
    ranks = {fit.source: fit.began.rank for fit in fits if fit.began.session == session}
    found = []
    for replica, mean_s in means.items():
        others = [s for other, s in means.items() if other != replica]
        rank = ranks[where[replica].partition(" ")[0]]
        found.append(
            {
                "replica": replica,
                "where": where[replica],
                "compute_ms": round(1000 * mean_s, 3),
                "score": round(statistics.median(others) / mean_s, 3) if others and mean_s else 1.0,
                "told": sorted(told.get(rank, ())),
            }
        )
    return sorted(found, key=lambda each: each["score"])


def _saved(fits: Sequence[Fit], states: Mapping[int, str] | None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for fit in goodput.chiefs(fits):
        for entry in fit.entries:
            event = entry.event
            if isinstance(event, events.Saved):
                state = "committed" if states is None else states.get(event.step, "replaced")
                found.append(
                    {
                        "at": entry.at,
                        "step": event.step,
                        "secs": event.secs,
                        "stall_secs": event.stall_secs,
                        "bytes": event.checkpoint_bytes,
                        "tier": "local" if event.is_local else "shared",
                        "state": "local" if event.is_local else state,
                    }
                )
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
                    }
                )
    return found


def _counts(saved: Mapping[str, Any]) -> bool:
    return saved["state"] in ("committed", "local")


def _incidents(fits: Sequence[Fit], supervised: Sequence[Entry]) -> list[dict[str, Any]]:
    """All that was not as it should be, each once, though several workers may tell of it."""
    found: list[dict[str, Any]] = []
    told: set[tuple[str, str]] = set()
    every = [
        (entry, what)
        for entries in (*(fit.entries for fit in fits), supervised)
        for entry in entries
        if not isinstance(entry.event, Window) and (what := _told(entry.event)) is not None
    ]
    for entry, what in sorted(every, key=lambda each: each[0].at):
        session_and_what = (str(entry.attempt), what)
        if session_and_what in told and not isinstance(entry.event, events.UpdateLeftOut):
            continue
        told.add(session_and_what)
        event = entry.event
        found.append(
            {
                "at": entry.at,
                "kind": next(name for name, kind in Event.kinds.items() if kind is type(event)),
                "what": what,
                "source": entry.source,
                "replicas": list(getattr(event, "replicas", ()) or ()),
                "variable": getattr(event, "variable", None),
                "epoch": getattr(event, "epoch", None),
                "batch": getattr(event, "batch", None),
            }
        )
    return found


def _told(event: Event) -> str | None:
    match event:
        case (
            events.UpdateLeftOut(what=what)
            | events.Diverged(what=what)
            | events.SlowReplica(what=what)
            | events.Hung(what=what)
            | events.Failed(what=what)
        ):
            return what
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
        case _:
            return None
