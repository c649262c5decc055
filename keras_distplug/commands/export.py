"""`keras-distplug export`: writes a checkpoint as one file."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from keras_distplug.commands import locations, modules, progress_bar, tables
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.storage import architecture, export_file, survey
from keras_distplug.storage.export_file import Export
from keras_distplug.storage.files import Files, local_path
from keras_distplug.storage.retention import Mode
from keras_distplug.storage.store import Stored
from keras_distplug.storage.survey import SurveyedRun


def run(parsed: argparse.Namespace) -> int:
    is_for_out = local_path(parsed.directory) is not None and local_path(parsed.out) is None
    # The options may be meant for OUT alone.
    of_directory = {} if is_for_out else parsed.storage_options
    best_by = _best_by(parsed)
    # Wrong options are reported before the directory is read.
    _ = Export(parsed.out, parsed.step, best_by=best_by, format=parsed.format)
    location = locations.of(argparse.Namespace(**{**vars(parsed), "storage_options": of_directory}))
    asked = Export(
        parsed.out,
        location.checkpoint,
        best_by=best_by,
        format=parsed.format,
        overwrite=parsed.overwrite,
        storage_options=parsed.storage_options,
    )
    files = location.files

    with progress_bar.bar() as bar:

        def save(run: str, stored: Stored, path: Path) -> None:
            made = architecture.recall(files, run, stored.manifest.cursor.step)
            with bar.hidden():  # TensorFlow and imported modules may print
                modules.load_needed(made.model, stored, parsed.modules)

                from keras_distplug.checkpoint.model_export import save_rebuilt

            save_rebuilt(made.model, stored.manifest, stored.values, path)

        seen = location.find_run()
        bar.start("exporting", _sum_bytes(files, seen, asked) if bar.is_shown else None, "bytes")
        done = export_file.export(bar.counting(files), seen, asked, save)
    if parsed.json:
        tables.say_json({"directory": files.where(), **asdict(done)})
    else:
        tables.say(f"{done.run}/{done.checkpoint}: exported to {done.out} ({done.format})")
    return 0


def _best_by(parsed: argparse.Namespace) -> tuple[str, Mode] | None:
    given = [value for value in (parsed.metric, parsed.mode) if value is not None]
    if given and (parsed.step != export_file.BEST or len(given) == 1):
        options = {"step": parsed.step, "metric": parsed.metric, "mode": parsed.mode}
        received = (f"--{name} {value}" for name, value in options.items() if value is not None)
        raise ConfigurationError(
            f"--metric and --mode go together, with `--step best`. Received: {' '.join(received)}"
        )
    return (parsed.metric, parsed.mode) if given else None


def _sum_bytes(files: Files, run: SurveyedRun, asked: Export) -> int:
    """Returns the size of the checkpoint that will be read."""
    if asked.step == export_file.BEST and asked.best_by is not None:
        return survey.choose_best(files, run, *asked.best_by).bytes
    return survey.choose(files, run, asked.step).bytes
