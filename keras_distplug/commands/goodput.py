"""`keras-distplug goodput`: prints the share of time that trained, and where the rest went."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from keras_distplug.commands import locations, progress_bar, run_logs, tables
from keras_distplug.core.errors import DistplugError
from keras_distplug.core.ledger import Category
from keras_distplug.runlog import goodput_totals, log_files
from keras_distplug.storage.files import Files

_WHAT: Mapping[Category, str] = {
    Category.STEP: "training steps, each counted once",
    Category.INPUT: "steps waiting for data",
    Category.SYNC: "steps waiting for other replicas, and summing gradients",
    Category.SAVE: "training paused for a checkpoint",
    Category.RESTORE: "reading a checkpoint",
    Category.START_UP: "starting processes, up to their first step",
    Category.REDONE: "steps that replace lost, skipped or rolled-back ones",
    Category.RECOVERY: "between the last sign of an attempt and the start of the next one",
    Category.EVALUATION: "validation",
    Category.OTHER: "callbacks, ends of epochs and processes, time without training",
}
_WAITS: Mapping[str, str] = {
    Category.INPUT: "waiting for data",
    Category.SYNC: "waiting for other replicas",
}


def run(parsed: argparse.Namespace) -> int:
    location = locations.of(parsed, needs_run=False)
    files = location.files
    with progress_bar.bar() as bar:
        names = run_logs.names(location, parsed)
        bar.start("reading logs", len(names), "runs")
        documents = []
        for name in names:
            documents.append(_document_or_error(files, name))
            bar.add(1)
    if parsed.json:
        tables.say_json({"directory": files.where(), "runs": documents})
    else:
        for each in documents:
            if each is not documents[0]:
                tables.say("")
            _print(each)
    return 1 if any("error" in each for each in documents) else 0


def _document_or_error(files: Files, run: str) -> dict[str, Any]:
    """Returns the figures of a run, or the error, so that it does not hide other runs."""
    try:
        return _document(files, run)
    except (DistplugError, OSError) as error:
        return {"name": run, "error": str(error)}


def _document(files: Files, run: str) -> dict[str, Any]:
    notes: list[str] = []
    fits, supervised = log_files.read(files, run, notes.append)
    chiefs = goodput_totals.chiefs(fits)
    spans = goodput_totals.spans(chiefs, supervised)
    begin, end = (spans[0].begin, spans[-1].end) if spans else (0.0, 0.0)
    secs = goodput_totals.totals(spans)
    workers = {
        rank: goodput_totals.spans(goodput_totals.select_rank(fits, rank), supervised)
        for rank in sorted({fit.began.rank for fit in fits})
    }
    return {
        "name": run,
        "notes": notes,
        "begins_at": begin if spans else None,
        "ends_at": end or None,
        "step": max((span.step for span in spans), default=0),
        "goodput": goodput_totals.goodput(secs),
        "goodput_lately": {
            f"{minutes} min": share
            for minutes, share in goodput_totals.goodput_lately(spans, begin, end).items()
        },
        "wall_secs": end - begin,
        "secs": dict(secs),
        "unknown_waits_secs": dict(goodput_totals.unknown_waits(chiefs)),
        "attempts": [asdict(each) for each in goodput_totals.attempts(fits, supervised)],
        "workers": {str(rank): dict(goodput_totals.totals(of)) for rank, of in workers.items()},
    }


def _print(document: Mapping[str, Any]) -> None:
    if "error" in document:
        tables.say(f"{document['name'] or 'log'}: cannot be read: {document['error']}")
        return
    tables.say(*document["notes"])
    if document["goodput"] is None:
        tables.say(f"{document['name'] or 'log'}: nothing has been logged yet")
        return
    lately = "".join(
        f", {_percent(each)} in the last {name}"
        for name, each in document["goodput_lately"].items()
        if each is not None
    )
    tables.say(
        f"{document['name'] or 'log'}: goodput {_percent(document['goodput'])} of "
        f"{_time(document['wall_secs'])}{lately}; step {document['step']}, "
        f"{tables.plural(len(document['attempts']), 'attempt')}"
    )
    secs, whole_s = document["secs"], document["wall_secs"]
    rows = [
        (str(category), f"{secs[category]:.1f}", _percent(secs[category] / whole_s), what)
        for category, what in _WHAT.items()
        if secs[category] or category is Category.STEP
    ]
    tables.say("")
    tables.say_table("", ("", "seconds", "share", ""), rows, right=("seconds", "share"))
    for category, unknown_s in document["unknown_waits_secs"].items():
        tables.say(
            f"Steps that took {unknown_s:.1f} s in total include an unknown amount of time "
            f"{_WAITS[category]}, which is counted under `step`. It cannot be measured if "
            "XLA compiles the steps, if `steps_per_execution` is greater than 1, or if a chief "
            "schedules the steps on workers."
        )
    tables.say("")
    attempts = [
        (
            str(each["number"]),
            _utc(each["begins_at"]),
            _time(each["ends_at"] - each["begins_at"]),
            str(each["workers"]),
            f"{each['first_step']} to {each['last_step']}",
            _lost(each),
            "" if each["exit_code"] is None else str(each["exit_code"]),
            each["end"] or "unknown",
        )
        for each in document["attempts"]
    ]
    columns = ("attempt", "started (UTC)", "time", "workers", "steps", "lost", "code", "end")
    tables.say_table("", columns, attempts, right=("attempt", "time", "workers", "lost", "code"))


def _lost(attempt: Mapping[str, Any]) -> str:
    steps = attempt["lost_steps"]
    if attempt["lost_is_exact"]:
        return str(steps)
    return f"at least {steps}" if steps else "not known"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _time(secs: float) -> str:
    """Returns a duration as text, such as `"2 h 03 min"`, `"5 min 07 s"` or `"12.3 s"`."""
    if secs < 60:
        return f"{secs:.1f} s"
    minutes, rest = divmod(round(secs), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _utc(at: float) -> str:
    return tables.time(datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat("T", "seconds"))
