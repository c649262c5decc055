"""`keras-distplug export`: a checkpoint as one file."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from keras_distplug.commands import modules, tables
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.storage import architecture, export_file
from keras_distplug.storage.export_file import Export
from keras_distplug.storage.files import local_path, open_files
from keras_distplug.storage.retention import Mode
from keras_distplug.storage.store import Stored


def run(parsed: argparse.Namespace) -> int:
    asked = Export(
        parsed.out,
        parsed.step,
        best_by=_best_by(parsed),
        format=parsed.format,
        overwrite=parsed.overwrite,
        storage_options=parsed.storage_options,
    )
    # They may be meant for OUT alone.
    is_for_out = local_path(parsed.directory) is not None and local_path(parsed.out) is None
    files = open_files(parsed.directory, {} if is_for_out else parsed.storage_options)

    def save(run: str, stored: Stored, path: Path) -> None:
        made = architecture.recall(files, run, stored.manifest.cursor.step)
        modules.load_for(made.model, stored, parsed.modules)

        from keras_distplug.checkpoint.model_export import save_rebuilt

        save_rebuilt(made.model, stored.manifest, stored.values, path)

    done = export_file.export(files, parsed.run, asked, save)
    if parsed.json:
        tables.say_json({"directory": files.where(), **asdict(done)})
    else:
        tables.say(f"{done.run}/{done.checkpoint}: exported to {done.out} ({done.format})")
    return 0


def _best_by(parsed: argparse.Namespace) -> tuple[str, Mode] | None:
    given = [value for value in (parsed.metric, parsed.mode) if value is not None]
    if given and (parsed.step != export_file.BEST or len(given) == 1):
        raise ConfigurationError(
            "--metric and --mode go together with `--step best`. Received: "
            f"--step {parsed.step} --metric {parsed.metric} --mode {parsed.mode}"
        )
    return (parsed.metric, parsed.mode) if given else None
