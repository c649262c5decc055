"""`keras-distplug ls`: what there is."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from keras_distplug.commands import tables
from keras_distplug.storage import runs, survey
from keras_distplug.storage.files import open_files
from keras_distplug.storage.survey import Seen, SeenRun

_COLUMNS = ("checkpoint", "state", "step", "epoch", "batch", "created (UTC)", "size", "workers")
_RIGHT = ("step", "epoch", "batch", "size", "workers")
_FEW = 4  # metrics, that a line has room for


def run(parsed: argparse.Namespace) -> int:
    files = open_files(parsed.directory, parsed.storage_options)
    names = survey.run_names(files, parsed.run)
    found = [survey.look_at(files, name) for name in names]
    going_on = runs.newest_name(files)
    if parsed.json:
        listed = [_run_as_json(each, each.name == going_on) for each in found]
        tables.say_json({"directory": files.where(), "runs": listed})
        return 0
    for each in found:
        if each is not found[0]:
            tables.say("")
        _print(each, is_taken=each.name == going_on)
    return 0


def as_json(seen: Seen, taken_by: str | None = None) -> dict[str, Any]:
    """A checkpoint, for machines."""
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


def _run_as_json(found: SeenRun, is_taken: bool) -> dict[str, Any]:
    taken = survey.taken_by(found) if is_taken else {}
    return {
        "name": found.name,
        "created_utc": found.record and found.record.created_utc,
        "reason": found.reason,
        "is_taken": is_taken and found.record is not None,
        "checkpoints": [as_json(each, taken.get(each.name)) for each in found.checkpoints],
    }


def _print(found: SeenRun, is_taken: bool) -> None:
    begun = f", begun {tables.time(found.record.created_utc)}" if found.record else ""
    mark = ", the one that training goes on with" if is_taken and found.record else ""
    title = f"{found.name}{begun}{mark}"
    if not found.checkpoints:
        tables.say(f"{title}: no checkpoints")
    else:
        _print_checkpoints(title, found, survey.taken_by(found) if is_taken else {})
    for problem in (found.reason, *(_problem(each) for each in found.checkpoints)):
        if problem is not None:
            tables.say(problem)


def _print_checkpoints(title: str, found: SeenRun, taken: Mapping[str, str]) -> None:
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
            known = manifest.metrics
            cells += [f"{known[name]:.4g}" if name in known else "" for name in metrics]
        rows.append([*cells, taken.get(each.name, "")])
    columns = (*_COLUMNS, *metrics, "taken by a fit with" if taken else "")
    tables.say_table(title, columns, rows, right=(*_RIGHT, *metrics))
    total = sum(each.bytes for each in found.checkpoints)
    tables.say(f"{tables.plural(len(found.checkpoints), 'checkpoint')}, {tables.size(total)}")


def _problem(seen: Seen) -> str | None:
    return None if seen.reason is None else f"{seen.name} is {seen.state}: {seen.reason}"
