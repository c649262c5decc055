"""One line for every training below a folder, for `keras-distplug ls`."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from keras_distplug.commands import tables
from keras_distplug.commands.progress_bar import Bar
from keras_distplug.core.errors import CheckpointError
from keras_distplug.runlog import log_files
from keras_distplug.runlog.summary import headline
from keras_distplug.storage import layout, runs, survey
from keras_distplug.storage.files import Files
from keras_distplug.storage.survey import SurveyedRun

_COLUMNS = ("training", "state", "step", "epoch", "runs", "checkpoints", "size", "last change")
_RIGHT = ("step", "epoch", "runs", "checkpoints", "size")
_LONGEST_STATE = 60  # characters; the message of an error may be longer


@dataclass(frozen=True)
class Row:
    """A training job.

    Args:
        name: Its path from the folder that was listed.
        run: The run that the next start resumes; `None` if the training cannot be read.
        state: `"finished"`, `"training"`, or what ended the last attempt.
        step: Trained batches, of the newest checkpoint or in the log.
        epoch: Finished epochs of the newest checkpoint; `None` without a checkpoint.
        runs: The number of runs.
        checkpoints: The number of committed checkpoints of all runs.
        bytes: The size of all checkpoints.
        changed_at: When something last happened, in seconds since 1970; `None` if unknown.
    """

    name: str
    run: str | None
    state: str
    step: int = 0
    epoch: int | None = None
    runs: int = 0
    checkpoints: int = 0
    bytes: int = 0
    changed_at: float | None = None


def rows(names: Sequence[str], open_training: Callable[[str], Files], bar: Bar) -> list[Row]:
    """Returns a row for every training job.

    Args:
        names: Their paths from the folder that is listed.
        open_training: Opens the directory of a training job.
        bar: Shows the progress.
    """
    bar.start("reading training jobs", len(names), "training jobs")
    found = []
    for name in names:
        try:
            found.append(_row(open_training(name), name))
        except (CheckpointError, OSError) as error:  # which hides no other training job
            found.append(Row(name, None, f"unreadable: {error}"))
        bar.add(1)
    return found


def _row(files: Files, name: str) -> Row:
    there = [survey.survey_run(files, run) for _, run in layout.runs(files)]
    resumed = runs.newest_name(files) or there[-1].name
    seen = next(each for each in there if each.name == resumed)
    committed = [each for run in there for each in run.committed()]
    newest = seen.committed()[-1:]
    step, changed_at, state = _of_log(files, resumed)
    created = [_seconds(each.whole.created_utc) for each in committed]
    if newest:
        step = max(step, newest[0].place.step)
    if _is_finished(seen):
        state = "finished"
    return Row(
        name=name,
        run=resumed,
        state=state or ("stopped" if newest else "no checkpoint"),
        step=step,
        epoch=newest[0].whole.cursor.epoch if newest else None,
        runs=len(there),
        checkpoints=len(committed),
        bytes=sum(each.bytes for run in there for each in run.checkpoints),
        changed_at=max([*created, *([changed_at] if changed_at else [])], default=None),
    )


def _of_log(files: Files, run: str) -> tuple[int, float | None, str]:
    """Returns the last step, the time of the last line, and the state, as TensorBoard's tab shows
    it; zeros if the run has no log."""
    if log_files.FOLDER not in layout.names(files, run):
        return 0, None, ""
    fits, supervised = log_files.read(files, run, lambda skipped: None)
    if not fits:
        return 0, None, ""
    found = headline(run, fits, supervised, time.time())
    return int(found["step"]), float(found["end"]), str(found["state"])


def _is_finished(run: SurveyedRun) -> bool:
    """True if the run has completed its epochs, and has not continued since."""
    committed = run.committed()
    return bool(committed) and committed[-1].place.kind == "final"


def _seconds(iso: str) -> float:
    return datetime.datetime.fromisoformat(iso).timestamp()


def print_table(files: Files, found: Sequence[Row]) -> None:
    now = time.time()
    table = [
        (
            each.name,
            each.state
            if len(each.state) <= _LONGEST_STATE
            else f"{each.state[:_LONGEST_STATE]}...",
            str(each.step),
            "" if each.epoch is None else str(each.epoch),
            str(each.runs),
            str(each.checkpoints),
            tables.size(each.bytes),
            "" if each.changed_at is None else f"{tables.age(now - each.changed_at)} ago",
        )
        for each in found
    ]
    tables.say_table(f"Training jobs in {files.where()}", _COLUMNS, table, right=_RIGHT)
    total = sum(each.bytes for each in found)
    tables.say(f"{tables.plural(len(found), 'training job')}, {tables.size(total)}")


def _shortened(state: str) -> str:
    return state if len(state) <= _LONGEST_STATE else f"{state[:_LONGEST_STATE]}..."


def as_json(files: Files, found: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns the rows for the document of `--json`."""
    return [
        {
            "name": each.name,
            "directory": files.where(each.name),
            "run": each.run,
            "state": each.state,
            "step": each.step,
            "epoch": each.epoch,
            "runs": each.runs,
            "checkpoints": each.checkpoints,
            "bytes": each.bytes,
            "changed_at": each.changed_at,
        }
        for each in found
    ]
