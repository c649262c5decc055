"""`keras-distplug prune`: deletes what need not stay."""

from __future__ import annotations

import argparse
from typing import Any

from keras_distplug.commands import tables
from keras_distplug.storage import pruning, survey
from keras_distplug.storage.files import open_files
from keras_distplug.storage.pruning import Outdated
from keras_distplug.storage.retention import Retention
from keras_distplug.storage.survey import Depth


def run(parsed: argparse.Namespace) -> int:
    retention = Retention(parsed.keep_last, parsed.keep_every_steps, _best(parsed.keep_best))
    files = open_files(parsed.directory, parsed.storage_options)
    told: list[dict[str, Any]] = []
    for name in survey.run_names(files, parsed.run):
        seen = pruning.checked(files, survey.look_at(files, name, Depth.SIZES), retention)
        going = pruning.outdated(seen, retention, damaged=parsed.damaged)
        if not parsed.dry_run:
            pruning.prune(files, name, going)
        if not parsed.json:
            tables.say(*(_line(name, each, parsed.dry_run) for each in going))
            unreadable = [each for each in seen.checkpoints if each.state == "unreadable"]
            tables.say(*(f"{name}/{each.name}: stays, {each.reason}" for each in unreadable))
        told += [_as_json(name, each) for each in going]
    freed = sum(each["bytes"] for each in told)
    if parsed.json:
        document = {"directory": files.where(), "dry_run": parsed.dry_run, "bytes": freed}
        tables.say_json({**document, "deleted": told})
    else:
        would = "would go" if parsed.dry_run else "deleted"
        tables.say(f"{tables.plural(len(told), 'checkpoint')} {would}, {tables.size(freed)}")
    return 0


def _best(words: list[str] | None) -> Any:
    if words is None:
        return None
    metric, mode, count = words
    # `Retention` says what is wrong with it.
    return metric, mode, int(count) if count.isdecimal() else count


def _line(run: str, going: Outdated, dry_run: bool) -> str:
    would = "would go" if dry_run else "deleted"
    return f"{run}/{going.seen.name}: {would}, {going.why}, {tables.size(going.seen.bytes)}"


def _as_json(run: str, going: Outdated) -> dict[str, Any]:
    seen = going.seen
    return {"run": run, "name": seen.name, "why": going.why, "bytes": seen.bytes}
