"""`keras-distplug report`: a page that shows runs."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from keras_distplug import page
from keras_distplug.commands import tables
from keras_distplug.core.errors import ConfigurationError, DistplugError
from keras_distplug.runlog import log_files
from keras_distplug.runlog.run_place import delay_secs, place_of
from keras_distplug.runlog.summary import summary
from keras_distplug.storage import survey
from keras_distplug.storage.files import Files, open_files

_STDOUT = "-"


def run(parsed: argparse.Namespace) -> int:
    files = open_files(parsed.directory, parsed.storage_options)
    now = time.time()
    runs = [_summary_or_error(files, name, now) for name in log_files.runs(files, parsed.run)]
    failed = [run for run in runs if "error" in run]
    name = _name(files.where(), parsed.run)
    html = page.html(f"{name}: keras_distplug", runs, now)
    if parsed.out == _STDOUT:
        sys.stdout.write(html)
        errors = [f"{run['name'] or 'log'} cannot be shown: {run['error']}" for run in failed]
        print(*errors, sep="\n", end="\n" if errors else "", file=sys.stderr)
        return 1 if failed else 0
    out = Path(parsed.out or f"{name}.html")
    _write(out, html, overwrite=parsed.overwrite)
    tables.say(f"{out}: {tables.plural(len(runs), 'run')}")
    for run in runs:
        tables.say(*run.get("notes", ()))
    tables.say(*(f"{run['name'] or 'log'} cannot be shown: {run['error']}" for run in failed))
    return 1 if failed else 0


def _name(where: str, run: str | None) -> str:
    """Returns the name of a training, for a title and a file: `"mnist"`, or `"mnist-run-0001"`."""
    parts = [part for part in re.split(r"[/\\]+", where) if part.strip(".")]
    names = [*parts[-1:], run]
    if parts and re.fullmatch(r"run-\d+", parts[-1]):
        names = [*parts[-2:], run]
    plain = "-".join(re.sub(r"[^\w.-]+", "_", name) for name in names if name)
    return plain or "report"


def _write(out: Path, html: str, *, overwrite: bool) -> None:
    if out.exists() and not overwrite:
        raise ConfigurationError(f"{out} exists. Give another name, or --overwrite.")
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(html, encoding="utf-8")
        os.replace(temporary, out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigurationError(
            f"{out} cannot be written: {error.strerror}. Give -o a file in a folder that exists."
        ) from error


def _summary_or_error(files: Files, run: str, now: float) -> dict[str, Any]:
    """Returns what the page shows, or the error, so that it does not hide other runs."""
    notes: list[str] = []
    try:
        fits, supervised = log_files.read(files, run, notes.append)
        checkpoints = survey.looked_at(files, run)
        place, delay = place_of(files, run), delay_secs(files)
        shown = summary(run, fits, supervised, now, checkpoints, place, delay)
        return {**shown, "notes": notes}
    except (DistplugError, OSError) as error:
        return {"name": run, "error": str(error)}
