"""`keras-distplug ls`: lists trainings, runs and checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from keras_distplug.commands import locations, overview, progress_bar, tables
from keras_distplug.commands.locations import Location
from keras_distplug.storage import layout, runs, survey
from keras_distplug.storage.files import open_files
from keras_distplug.storage.survey import SurveyedCheckpoint, SurveyedRun

_COLUMNS = ("checkpoint", "state", "step", "epochs", "batches", "created (UTC)", "size", "workers")
_RIGHT = ("step", "epochs", "batches", "size", "workers")
_FEW = 4  # metrics that fit into a line


def run(parsed: argparse.Namespace) -> int:
    location = locations.of(parsed, needs_run=False)
    files = location.files
    if location.run is None and not layout.runs(files):
        with progress_bar.bar() as bar:
            bar.start("searching for training jobs")
            names = locations.trainings(files)
            if not names:
                raise locations.no_run(parsed.directory, parsed.storage_options, files)
            base = parsed.directory.rstrip("/")
            options = parsed.storage_options
            found = overview.rows(names, lambda name: open_files(f"{base}/{name}", options), bar)
        if parsed.json:
            document = {"directory": files.where(), "trainings": overview.as_json(files, found)}
            tables.say_json(document)
        else:
            overview.print_table(files, found)
        return 0
    selected = [_selected(location, name) for name in location.run_names()]
    resumed = runs.newest_name(files)
    if parsed.json:
        listed = [_run_as_json(each, each.name == resumed) for each in selected]
        tables.say_json({"directory": files.where(), "runs": listed})
        return 0
    for each in selected:
        if each is not selected[0]:
            tables.say("")
        _print(each, is_resumed=each.name == resumed, is_copy=location.is_copy)
    return 0


def _selected(location: Location, name: str) -> SurveyedRun:
    """Returns a run with the selected checkpoint, by default with all of them.

    Raises:
        NoCheckpointError: If the run has no such checkpoint.
    """
    found = survey.survey_run(location.files, name)
    if location.checkpoint is None:
        return found
    chosen = [
        each for each in found.checkpoints if location.checkpoint in (each.place.step, each.name)
    ]
    if not chosen:
        survey.choose(location.files, found, location.checkpoint)  # raises, and lists what exists
    return replace(found, checkpoints=tuple(chosen))


def as_json(seen: SurveyedCheckpoint, taken_by: str | None = None) -> dict[str, Any]:
    """Returns a checkpoint for the document of `--json`."""
    manifest = seen.manifest
    return {
        "name": seen.name,
        "kind": seen.place.kind,
        "state": seen.state,
        "reason": seen.reason,
        "step": seen.place.step,
        "epoch": manifest and manifest.cursor.epoch,
        "batch": manifest and manifest.cursor.batch,
        "created_utc": manifest and manifest.created_utc,
        "bytes": seen.bytes,
        "workers": manifest and manifest.world_size,
        "metrics": manifest and manifest.metrics,
        "taken_by": taken_by,
    }


def _run_as_json(found: SurveyedRun, is_resumed: bool) -> dict[str, Any]:
    taken = survey.list_taken(found) if is_resumed else {}
    return {
        "name": found.name,
        "created_utc": found.record and found.record.created_utc,
        "reason": found.reason,
        "is_taken": is_resumed and found.record is not None,
        "checkpoints": [as_json(each, taken.get(each.name)) for each in found.checkpoints],
    }


def _print(found: SurveyedRun, *, is_resumed: bool, is_copy: bool) -> None:
    started = f", started {tables.time(found.record.created_utc)}" if found.record else ""
    mark = ""
    if is_resumed and found.record:
        committed = [each for each in found.checkpoints if each.state == "committed"]
        is_finished = bool(committed) and committed[-1].place.kind == "final"
        mark = ", finished" if is_finished else ", resumed by the next start"
    title = f"{found.name}{started}{mark}"
    if not found.checkpoints:
        tables.say(f"{title}: no checkpoints")
    else:
        _print_checkpoints(title, found, survey.list_taken(found) if is_resumed else {})
    reason = None if is_copy else found.reason  # a copy of a checkpoint has no record of a run
    for problem in (reason, *(_problem(each) for each in found.checkpoints)):
        if problem is not None:
            tables.say(problem)


def _print_checkpoints(title: str, found: SurveyedRun, taken: Mapping[str, str]) -> None:
    manifests = [each.manifest for each in found.checkpoints if each.manifest]
    metrics = list(dict.fromkeys(name for each in manifests for name in each.metrics))
    if len(metrics) > _FEW:
        metrics = [name for name in metrics if name in ("loss", "val_loss")]
    rows = []
    for each in found.checkpoints:
        manifest = each.manifest
        cells = [each.name, each.state, str(each.place.step)]
        if manifest is None:
            cells += ["", "", "", tables.size(each.bytes), ""] + [""] * len(metrics)
        else:
            cells += [
                str(manifest.cursor.epoch),
                str(manifest.cursor.batch),
                tables.time(manifest.created_utc),
                tables.size(each.bytes),
                str(manifest.world_size),
            ]
            values = manifest.metrics
            cells += [f"{values[name]:.4g}" if name in values else "" for name in metrics]
        rows.append([*cells, taken.get(each.name, "")])
    columns = (*_COLUMNS, *metrics, "resumed by a fit with" if taken else "")
    tables.say_table(title, columns, rows, right=(*_RIGHT, *metrics))
    total = sum(each.bytes for each in found.checkpoints)
    tables.say(f"{tables.plural(len(found.checkpoints), 'checkpoint')}, {tables.size(total)}")


def _problem(seen: SurveyedCheckpoint) -> str | None:
    return None if seen.reason is None else f"{seen.name} is {seen.state}: {seen.reason}"
