"""`keras-distplug goodput`: what share of the time trained, and where the rest went."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from keras_distplug.commands import tables
from keras_distplug.core.errors import DistplugError
from keras_distplug.core.ledger import Category
from keras_distplug.runlog import goodput_totals, log_files
from keras_distplug.storage.files import Files, open_files

_WHAT: Mapping[Category, str] = {
    Category.STEP: "updates, each for the first time",
    Category.INPUT: "steps that wait for data",
    Category.SYNC: "steps that wait for other replicas, and for the sum of gradients",
    Category.SAVE: "training stands still for a checkpoint",
    Category.RESTORE: "reading a checkpoint",
    Category.START_UP: "processes, up to their first step",
    Category.REDONE: "steps for others that were lost: of an attempt, left out, rolled back",
    Category.RECOVERY: "from what is known last of an attempt to the next one's start",
    Category.EVALUATION: "validation",
    Category.OTHER: "callbacks, the ends of epochs and processes, nobody training",
}
_WAITS: Mapping[str, str] = {
    Category.INPUT: "waiting for data",
    Category.SYNC: "waiting for other replicas",
}


def run(parsed: argparse.Namespace) -> int:
    files = open_files(parsed.directory, parsed.storage_options)
    told = [_document_or_error(files, name) for name in log_files.runs(files, parsed.run)]
    if parsed.json:
        tables.say_json({"directory": files.where(), "runs": told})
    else:
        for each in told:
            if each is not told[0]:
                tables.say("")
            _print(each)
    return 1 if any("error" in each for each in told) else 0


def _document_or_error(files: Files, run: str) -> dict[str, Any]:
    """Returns what is known about a run, or the error, so that it does not hide other runs."""
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
        rank: goodput_totals.spans(goodput_totals.of_rank(fits, rank), supervised)
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


def _print(told: Mapping[str, Any]) -> None:
    if "error" in told:
        tables.say(f"{told['name'] or 'log'}: cannot be read: {told['error']}")
        return
    tables.say(*told["notes"])
    if told["goodput"] is None:
        tables.say(f"{told['name'] or 'log'}: no time is known yet")
        return
    lately = "".join(
        f", {_percent(each)} in the last {name}"
        for name, each in told["goodput_lately"].items()
        if each is not None
    )
    tables.say(
        f"{told['name'] or 'log'}: goodput {_percent(told['goodput'])} of "
        f"{_time(told['wall_secs'])}{lately}; step {told['step']}, "
        f"{tables.plural(len(told['attempts']), 'attempt')}"
    )
    secs, whole_s = told["secs"], told["wall_secs"]
    rows = [
        (str(category), f"{secs[category]:.1f}", _percent(secs[category] / whole_s), what)
        for category, what in _WHAT.items()
        if secs[category] or category is Category.STEP
    ]
    tables.say("")
    tables.say_table("", ("", "seconds", "share", ""), rows, right=("seconds", "share"))
    for category, unknown_s in told["unknown_waits_secs"].items():
        tables.say(
            f"Of {unknown_s:.1f} s of steps it is not known how much was {_WAITS[category]}: XLA "
            "compiles them, an execution has several, or a chief schedules them on workers. It "
            "counts as updates."
        )
    tables.say("")
    attempts = [
        (
            str(each["number"]),
            _moment(each["begins_at"]),
            _time(each["ends_at"] - each["begins_at"]),
            str(each["workers"]),
            f"{each['first_step']} to {each['last_step']}",
            str(each["lost_steps"]),
            "" if each["exit_code"] is None else str(each["exit_code"]),
            each["end"] or "not known",
        )
        for each in told["attempts"]
    ]
    columns = ("attempt", "begun (UTC)", "time", "workers", "steps", "lost", "code", "end")
    tables.say_table("", columns, attempts, right=("attempt", "time", "workers", "lost", "code"))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _time(secs: float) -> str:
    """`"2 h 03 min"`, `"5 min 07 s"`, `"12.3 s"`."""
    if secs < 60:
        return f"{secs:.1f} s"
    minutes, rest = divmod(round(secs), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _moment(at: float) -> str:
    return tables.time(datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat("T", "seconds"))
