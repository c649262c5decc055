"""`keras-distplug report`: a page that shows runs."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from keras_distplug import page
from keras_distplug.commands import tables
from keras_distplug.core.errors import ConfigurationError, DistplugError
from keras_distplug.runlog import log_files
from keras_distplug.runlog.summary import summary
from keras_distplug.storage import survey
from keras_distplug.storage.files import Files, open_files


def run(parsed: argparse.Namespace) -> int:
    files = open_files(parsed.directory, parsed.storage_options)
    now = time.time()
    runs = [_summary_or_error(files, name, now) for name in log_files.runs(files, parsed.run)]
    out = Path(parsed.out)
    if out.exists() and not parsed.overwrite:
        raise ConfigurationError(f"{out} exists. Give another name, or --overwrite.")
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
    """Returns what the page shows, or the error, so that it does not hide other runs."""
    notes: list[str] = []
    try:
        told = log_files.read(files, run, notes.append)
        return {**summary(run, *told, now, survey.looked_at(files, run)), "notes": notes}
    except (DistplugError, OSError) as error:
        return {"name": run, "error": str(error)}
