"""`keras-distplug report`: writes a page that shows runs."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from keras_distplug import page
from keras_distplug.commands import locations, progress_bar, run_logs, tables
from keras_distplug.core.errors import ConfigurationError, DistplugError
from keras_distplug.runlog import log_files
from keras_distplug.runlog.summary import summary
from keras_distplug.storage import survey
from keras_distplug.storage.files import Files


def run(parsed: argparse.Namespace) -> int:
    location = locations.of(parsed, needs_run=False)
    files, now = location.files, time.time()
    out = Path(parsed.out)
    if out.exists() and not parsed.overwrite:
        raise ConfigurationError(f"{out} exists. Give another name, or --overwrite.")
    with progress_bar.bar() as bar:
        names = run_logs.names(location, parsed)
        bar.start("reading logs", len(names), "runs")
        runs = []
        for name in names:
            runs.append(_summary_or_error(files, name, now))
            bar.add(1)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(
            page.html(f"keras_distplug: {files.where()}", runs, now), encoding="utf-8"
        )
        os.replace(temporary, out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigurationError(
            f"{out} cannot be written: {error.strerror}. Give -o a file in a folder that exists."
        ) from error
    tables.say(f"{out}: {tables.plural(len(runs), 'run')}")
    for run in runs:
        tables.say(*run.get("notes", ()))
    failed = [run for run in runs if "error" in run]
    tables.say(*(f"{run['name'] or 'log'} cannot be shown: {run['error']}" for run in failed))
    return 1 if failed else 0


def _summary_or_error(files: Files, run: str, now: float) -> dict[str, Any]:
    """Returns the data for the page, or the error, so that it does not hide other runs."""
    notes: list[str] = []
    try:
        fits, supervised = log_files.read(files, run, notes.append)
        checkpoints = survey.looked_at(files, run)
        return {**summary(run, fits, supervised, now, checkpoints), "notes": notes}
    except (DistplugError, OSError) as error:
        return {"name": run, "error": str(error)}
