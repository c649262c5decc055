"""`keras-distplug report`: writes a page that shows runs."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from keras_distplug import page
from keras_distplug.commands import locations, progress_bar, run_logs, tables
from keras_distplug.core.errors import ConfigurationError, DistplugError
from keras_distplug.runlog import log_files
from keras_distplug.runlog.run_place import delay_secs, find_place
from keras_distplug.runlog.summary import summary
from keras_distplug.storage import survey
from keras_distplug.storage.files import Files

_STDOUT = "-"


def run(parsed: argparse.Namespace) -> int:
    location = locations.of(parsed, needs_run=False)
    files, now = location.files, time.time()
    name = _name(files.where(), location.run)
    out = None if parsed.out == _STDOUT else Path(parsed.out or f"{name}.html")
    if out is not None and out.exists() and not parsed.overwrite:
        raise ConfigurationError(
            f"{out} already exists. Give another name with -o, or pass --overwrite."
        )
    with progress_bar.bar() as bar:
        names = run_logs.names(location, parsed)
        bar.start("reading logs", len(names), "runs")
        runs = []
        for each in names:
            runs.append(_summary_or_error(files, each, now))
            bar.add(1)
    html = page.html(f"{name}: keras_distplug", runs, now)
    errors = [
        f"{run['name'] or 'log'} cannot be shown: {run['error']}" for run in runs if "error" in run
    ]
    if out is None:
        sys.stdout.write(html)
        print(*errors, sep="\n", end="\n" if errors else "", file=sys.stderr)
        return 1 if errors else 0
    _write(out, html)
    tables.say(f"{out}: written, with {tables.plural(len(runs), 'run')}")
    for run in runs:
        tables.say(*run.get("notes", ()))
    tables.say(*errors)
    return 1 if errors else 0


def _name(where: str, run: str | None) -> str:
    """Returns the name of a job for a title and a file: `"mnist"`, or `"mnist-run-0001"`."""
    parts = [part for part in re.split(r"[/\\]+", where) if part.strip(".")]
    names = [*parts[-1:], run]
    if parts and re.fullmatch(r"run-\d+", parts[-1]):
        names = [*parts[-2:], run]
    plain = "-".join(re.sub(r"[^\w.-]+", "_", name) for name in names if name)
    return plain or "report"


def _write(out: Path, html: str) -> None:
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(html, encoding="utf-8")
        os.replace(temporary, out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigurationError(
            f"{out} cannot be written: {error.strerror}. Give -o a file in a folder that exists "
            "and can be written."
        ) from error


def _summary_or_error(files: Files, run: str, now: float) -> dict[str, Any]:
    """Returns the data for the page, or the error, so that it does not hide other runs."""
    notes: list[str] = []
    try:
        fits, supervised = log_files.read(files, run, notes.append)
        checkpoints = survey.checkpoint_states(files, run)
        place, delay = find_place(files, run), delay_secs(files)
        shown = summary(run, fits, supervised, now, checkpoints, place, delay)
        return {**shown, "notes": notes}
    except (DistplugError, OSError) as error:
        return {"name": run, "error": str(error)}
