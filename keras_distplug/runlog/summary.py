"""A run as the page shows it, in a size that does not grow with the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from keras_distplug.core import events
from keras_distplug.core.events import Entry
from keras_distplug.core.ledger import Category
from keras_distplug.runlog import goodput_totals, loss_curve, replicas_shown
from keras_distplug.runlog.goodput_totals import Fit, Span
from keras_distplug.runlog.incident_groups import Place
from keras_distplug.runlog.replicas_shown import BINS
from keras_distplug.runlog.run_verdict import Verdict, verdict
from keras_distplug.storage.survey import CheckpointState

_MOST_EVENTS = 200
_UNKNOWN_PLACE = Place()


def headline(
    name: str,
    fits: Sequence[Fit],
    supervised: Sequence[Entry],
    now: float,
    checkpoints: Mapping[int, CheckpointState] | None = None,
    place: Place = _UNKNOWN_PLACE,
    delay_secs: float = 0.0,
) -> dict[str, Any]:
    """Returns what distinguishes a run from others, JSON-able. Without news, only its `status`
    changes.

    Args:
        name: The run's name.
        fits: The fits of all workers.
        supervised: The supervisors' events.
        now: Seconds since 1970.
        checkpoints: The existing checkpoints, by their steps. Defaults to `None`: not known.
        place: The place of the run, for command lines.
        delay_secs: As for `verdict`. Defaults to 0.
    """
    return make_headline(name, judged(fits, supervised, now, checkpoints, place, delay_secs))


def summary(
    name: str,
    fits: Sequence[Fit],
    supervised: Sequence[Entry],
    now: float,
    checkpoints: Mapping[int, CheckpointState] | None = None,
    place: Place = _UNKNOWN_PLACE,
    delay_secs: float = 0.0,
) -> dict[str, Any]:
    """Returns everything that a page shows of a run: its `headline`, which has the same arguments,
    and more."""
    return summarize(name, fits, judged(fits, supervised, now, checkpoints, place, delay_secs))


def summarize(name: str, fits: Sequence[Fit], found: Judged) -> dict[str, Any]:
    """Returns the summary of a run that was judged already."""
    spans, begin, end = found.spans, found.begin, found.end
    return {
        **make_headline(name, found),
        "secs": {str(category): value for category, value in goodput_totals.totals(spans).items()},
        "unknown_waits": {
            str(category): value
            for category, value in goodput_totals.unknown_waits(goodput_totals.chiefs(fits)).items()
        },
        "attempts": [_attempt(each) for each in found.attempts[-_MOST_EVENTS:]],
        "area": _area(spans, begin, end),
        "loss": loss_curve.points(goodput_totals.chiefs(fits), begin, end),
        "heat": replicas_shown.heat(fits, begin, end),
        "ranking": replicas_shown.ranking(fits),
        "checkpoints": found.saved[-_MOST_EVENTS:],
        "incidents": [asdict(group) for group in found.verdict.groups[:_MOST_EVENTS]],
    }


@dataclass(frozen=True)
class Judged:
    """A run and its known state.

    Args:
        verdict: Its state.
        spans: The time of its chief.
        begin: The start of that, in seconds since 1970.
        end: When that finished.
        attempts: All attempts.
        saved: All checkpoints.
        last_checkpoint: The newest one that was verified, or None.
        newer_checkpoint: The newest one, if that is another one.
    """

    verdict: Verdict
    spans: Sequence[Span]
    begin: float
    end: float
    attempts: Sequence[goodput_totals.Attempt]
    saved: Sequence[dict[str, Any]]
    last_checkpoint: Mapping[str, Any] | None
    newer_checkpoint: Mapping[str, Any] | None

    @property
    def goodput(self) -> float | None:
        return goodput_totals.goodput(goodput_totals.totals(self.spans))


def judged(
    fits: Sequence[Fit],
    supervised: Sequence[Entry],
    now: float,
    checkpoints: Mapping[int, CheckpointState] | None = None,
    place: Place = _UNKNOWN_PLACE,
    delay_secs: float = 0.0,
) -> Judged:
    """Judges a run; the arguments are those of `headline`."""
    spans = goodput_totals.spans(goodput_totals.chiefs(fits), supervised)
    begin, end = _range(fits, supervised, spans)
    attempts = goodput_totals.attempts(fits, supervised)
    saved = _saved(fits, checkpoints)
    there = [each for each in saved if each["state"] == "committed"]
    last = next((each for each in reversed(there) if each["verified"]), None)
    newest = there[-1] if there else None
    found = verdict(
        fits,
        supervised,
        now,
        attempts=attempts,
        spans=spans,
        checkpoint=newest,
        place=place,
        delay_secs=delay_secs,
    )
    newer = None if newest is last else newest
    return Judged(found, spans, begin, end, attempts, saved, last, newer)


def make_headline(name: str, found: Judged) -> dict[str, Any]:
    """Returns the headline of a run that was judged already."""
    last, newer = found.last_checkpoint, found.newer_checkpoint
    lately = goodput_totals.goodput_lately(found.spans, found.begin, found.end)
    return {
        "name": name,
        "begin": found.begin,
        "end": found.end,
        "state": str(found.verdict.state),
        "status": _status(found.verdict),
        "step": found.verdict.progress.step,
        "goodput": found.goodput,
        "goodput_lately": {str(minutes): share for minutes, share in lately.items()},
        "attempted": len(found.attempts),
        "last_checkpoint": last and {key: last[key] for key in ("at", "step", "verified")},
        "newer_checkpoint": newer and {key: newer[key] for key in ("at", "step")},
    }


def _status(found: Verdict) -> dict[str, Any]:
    known = {each.name: getattr(found, each.name) for each in fields(found)}
    del known["groups"]
    return {
        **known,
        "level": found.level,
        "progress": {**asdict(found.progress), "logs": dict(found.progress.logs)},
        "until": found.until if math.isfinite(found.until) else None,
    }


def _range(
    fits: Sequence[Fit], supervised: Sequence[Entry], spans: Sequence[Span]
) -> tuple[float, float]:
    """Returns the start and the end of the charts, which change only with news."""
    if spans:
        return spans[0].begin, spans[-1].end
    told = [
        entry.at for entries in (*(fit.entries for fit in fits), supervised) for entry in entries
    ]
    return min(told, default=0.0), max(told, default=0.0)


def _attempt(attempt: goodput_totals.Attempt) -> dict[str, Any]:
    return {
        "number": attempt.number,
        "begin": attempt.begins_at,
        "end": attempt.ends_at,
        "workers": attempt.workers,
        "first_step": attempt.first_step,
        "last_step": attempt.last_step,
        "lost_steps": attempt.lost_steps,
        "lost_is_exact": attempt.lost_is_exact,
        "cause": attempt.end,
        "exit_code": attempt.exit_code,
    }


def _area(spans: Sequence[Span], begin: float, end: float) -> dict[str, Any]:
    """Returns the share of every category in every stretch of time."""
    width = (end - begin) / BINS or 1.0  # a run that has just started has no length
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


def _saved(
    fits: Sequence[Fit], looked: Mapping[int, CheckpointState] | None
) -> list[dict[str, Any]]:
    """Returns all checkpoints with their state; if it is not known, as the log describes them."""
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


def _row(
    at: float, event: events.Saved, looked: Mapping[int, CheckpointState] | None
) -> dict[str, Any]:
    seen = CheckpointState("committed", False)
    if looked is not None and not event.is_local:  # a worker's local disk is not visible from here
        seen = looked.get(event.step, CheckpointState("replaced", False))
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
    """Marks a restored checkpoint: restoring compares all bytes with their checksums."""
    tier = "local" if event.is_local else "shared"
    for each in reversed(saved):
        if (each["step"], each["tier"]) == (event.step, tier):
            if each["state"] == "committed":
                each["verified"] = "read back"
            return
