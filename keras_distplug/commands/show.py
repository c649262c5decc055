"""`keras-distplug show`: prints the contents of one checkpoint."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from keras_distplug.commands import locations, tables
from keras_distplug.commands.ls import as_json
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.storage import codec, runs, survey
from keras_distplug.storage.manifest import Manifest, VariableSpec
from keras_distplug.storage.survey import SurveyedCheckpoint


def run(parsed: argparse.Namespace) -> int:
    if parsed.name is not None and parsed.step is not None:
        raise ConfigurationError(
            f"Give a name or a step, not both. Received: {parsed.name} and --step {parsed.step}"
        )
    step = parsed.name if parsed.name is not None else parsed.step
    location = locations.of(argparse.Namespace(**{**vars(parsed), "step": step}))
    files = location.files
    seen_run = location.find_run()
    seen = survey.choose(files, seen_run, location.checkpoint)
    is_taken = runs.newest_name(files) == seen_run.name
    taken_by = survey.list_taken(seen_run).get(seen.name) if is_taken else None
    if parsed.json:
        document = {"directory": files.where(), "run": seen_run.name, **as_json(seen, taken_by)}
        tables.say_json({**document, **_manifest_as_json(seen.whole)})
    else:
        _print(files.where(f"{seen_run.name}/{seen.name}"), seen, taken_by)
    return 0


def _manifest_as_json(manifest: Manifest) -> dict[str, Any]:
    return {
        "history": manifest.history,
        "history_epochs": manifest.history_epochs,
        "stop_training": manifest.stop_training,
        "completion": manifest.completion and asdict(manifest.completion),
        "data": manifest.data,
        "versions": manifest.versions,
        "files": [asdict(shard) for shard in manifest.shards],
        "variables": [
            {"key": each.key, "shape": each.shape, "dtype": each.dtype, "bytes": _bytes(each)}
            for each in manifest.variables
        ],
    }


def _print(where: str, seen: SurveyedCheckpoint, taken_by: str | None) -> None:
    manifest = seen.whole
    cursor, ended = manifest.cursor, manifest.completion
    tables.say(where)
    rows = {
        "step": str(cursor.step),
        "epoch": f"{cursor.epoch} done" + (f", and {cursor.batch} batches" if cursor.batch else ""),
        "end": ended
        and f"of {ended.epochs} epochs" + (", stopped early" if ended.stopped_early else ""),
        "created": f"{tables.time(manifest.created_utc)} UTC",
        "workers": str(manifest.world_size),
        "resumed by a fit with": taken_by,
        "metrics": tables.numbers(manifest.metrics),
        "last history": tables.numbers(_last(manifest)),
        "versions": "  ".join(f"{name} {version}" for name, version in manifest.versions.items()),
    }
    tables.say_table("", ("", ""), [(name, value) for name, value in rows.items() if value])
    tables.say("")
    shards = [(each.file, tables.size(each.bytes), each.xxh3_128) for each in manifest.shards]
    tables.say_table("", ("file", "size", "XXH3, 128 bits"), shards, right=("size",))
    tables.say("")
    variables = [
        (each.key, str(list(each.shape)), each.dtype, tables.size(_bytes(each)))
        for each in manifest.variables
    ]
    tables.say_table("", ("variable", "shape", "type", "size"), variables, right=("size",))
    tables.say("", *_totals(manifest))


def _last(manifest: Manifest) -> dict[str, float]:
    """Returns the newest value of every name whose values are numbers."""
    last = {name: values[-1] for name, values in manifest.history.items() if values}
    return {name: value for name, value in last.items() if isinstance(value, int | float)}


def _totals(manifest: Manifest) -> list[str]:
    groups: dict[str, list[VariableSpec]] = {}
    for each in manifest.variables:
        groups.setdefault(each.key.partition("/")[0], []).append(each)
    totals = [
        f"{group}: {len(specs)} variables, {tables.size(codec.count_bytes(specs))}"
        for group, specs in groups.items()
    ]
    stored = sum(shard.bytes for shard in manifest.shards)
    return [*totals, f"in files: {tables.size(stored)}"]


def _bytes(variable: VariableSpec) -> int:
    return codec.count_bytes([variable])
