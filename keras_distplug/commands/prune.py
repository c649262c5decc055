"""`keras-distplug prune`: deletes checkpoints that are no longer needed."""

from __future__ import annotations

import argparse
from typing import Any

from keras_distplug.commands import locations, progress_bar, tables
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.storage import pruning, survey
from keras_distplug.storage.pruning import Outdated
from keras_distplug.storage.retention import Retention
from keras_distplug.storage.survey import Depth


def run(parsed: argparse.Namespace) -> int:
    retention = Retention(parsed.keep_last, parsed.keep_every_steps, _best(parsed.keep_best))
    location = locations.of(parsed)
    if location.checkpoint is not None:
        raise ConfigurationError(
            "Expected the directory of a training job, or the folder of one of its runs, because "
            "`prune` decides which of a run's checkpoints to keep. Received: the checkpoint "
            f"{location.checkpoint}. Pass {location.files.where(location.run or '')} instead or, "
            "to delete only this checkpoint, delete its folder yourself."
        )
    files = location.files
    deleted: list[dict[str, Any]] = []
    with progress_bar.bar() as bar:
        for name in location.run_names():
            bar.start(f"checking {name}", None, "bytes")
            read = bar.counting(files)
            seen = pruning.checked(read, survey.survey_run(read, name, Depth.SIZES), retention)
            outdated = pruning.outdated(seen, retention, damaged=parsed.damaged)
            if not parsed.dry_run:
                # Every checkpoint takes two deletions: its manifest, then the rest.
                bar.start(f"pruning {name}", 2 * len(outdated), "deletions")
                pruning.prune(bar.counting_deletions(files), name, outdated)
            if not parsed.json:
                unreadable = [each for each in seen.checkpoints if each.state == "unreadable"]
                with bar.hidden():
                    tables.say(*(_line(name, each, parsed.dry_run) for each in outdated))
                    tables.say(*(f"{name}/{each.name}: kept, {each.reason}" for each in unreadable))
            deleted += [_as_json(name, each) for each in outdated]
    freed = sum(each["bytes"] for each in deleted)
    if parsed.json:
        document = {"directory": files.where(), "dry_run": parsed.dry_run, "bytes": freed}
        tables.say_json({**document, "deleted": deleted})
    else:
        verb = _verb(parsed.dry_run)
        tables.say(f"{tables.plural(len(deleted), 'checkpoint')} {verb}, {tables.size(freed)}")
    return 0


def _best(words: list[str] | None) -> Any:
    if words is None:
        return None
    metric, mode, count = words
    # `Retention` reports a wrong value.
    return metric, mode, int(count) if count.isdecimal() else count


def _line(run: str, outdated: Outdated, dry_run: bool) -> str:
    seen = outdated.seen
    return f"{run}/{seen.name}: {_verb(dry_run)}, {outdated.why}, {tables.size(seen.bytes)}"


def _verb(dry_run: bool) -> str:
    return "would be deleted" if dry_run else "deleted"


def _as_json(run: str, outdated: Outdated) -> dict[str, Any]:
    seen = outdated.seen
    return {"run": run, "name": seen.name, "why": outdated.why, "bytes": seen.bytes}
