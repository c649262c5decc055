"""Read-only inspection of a directory's runs and checkpoints.

A training may write to the directory meanwhile: a checkpoint that is deleted during the inspection
is skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from keras_distplug.core.errors import (
    CheckpointError,
    ConfigurationError,
    CorruptCheckpointError,
    NoCheckpointError,
)
from keras_distplug.storage import layout, runs
from keras_distplug.storage.files import Files, remedy
from keras_distplug.storage.layout import Kind, Place
from keras_distplug.storage.manifest import Manifest
from keras_distplug.storage.retention import Mode, RetentionEntry, rated
from keras_distplug.storage.runs import RunRecord
from keras_distplug.storage.store import CheckpointStore

State = Literal["committed", "damaged", "unreadable", "cut off", "unfinished"]
KINDS: tuple[Kind, ...] = ("step", "final")
_CHECKED = 3  # the number of newest checkpoints that `checkpoint_states` checks, since it is polled


@dataclass(frozen=True)
class CheckpointState:
    """The status of a checkpoint.

    Args:
        state: A `State`, or `"replaced"` if it no longer exists.
        has_sizes: True if its files were checked and have the sizes that were committed.
    """

    state: str
    has_sizes: bool


class Depth(IntEnum):
    """The depth to which checkpoints are checked."""

    MANIFESTS = 0
    SIZES = 1
    BYTES = 2


@dataclass(frozen=True)
class SurveyedCheckpoint:
    """A checkpoint, complete or not.

    Args:
        place: Its place in the run.
        state: `"committed"`; `"damaged"`; `"unreadable"` if another release wrote it or the storage
            cannot read it; `"cut off"` if its save was interrupted; or `"unfinished"` if no newer
            one is committed, so that its save may still be in progress.
        bytes: The total size of its arrays' files, in bytes.
        manifest: Its manifest, if that could be read.
        reason: The reason why it is damaged or unreadable.
        is_set_aside: True if a training job found it damaged and quarantined it, so that none
            restores it any more.
    """

    place: Place
    state: State
    bytes: int
    manifest: Manifest | None = None
    reason: str | None = None
    is_set_aside: bool = False

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def whole(self) -> Manifest:
        """The manifest of a committed checkpoint."""
        if self.manifest is None:
            raise ValueError(f"{self.name} is {self.state}")
        return self.manifest


@dataclass(frozen=True)
class SurveyedRun:
    """A run and its checkpoints.

    Args:
        name: The name of its folder.
        record: Its record, if that could be read.
        reason: The reason why the record could not be read; no training resumes the run then.
        checkpoints: All checkpoints, complete or not, oldest first.
    """

    name: str
    record: RunRecord | None
    reason: str | None
    checkpoints: tuple[SurveyedCheckpoint, ...]

    def committed(self, kind: Kind | None = None) -> list[SurveyedCheckpoint]:
        return [
            each
            for each in self.checkpoints
            if each.state == "committed" and kind in (None, each.place.kind)
        ]


def run_names(files: Files, only: str | None = None) -> list[str]:
    """Returns the names of the runs, oldest first.

    Args:
        files: The directory.
        only: The name of a single run to return. Defaults to `None`: all runs.

    Raises:
        NoCheckpointError: If the run does not exist.
        CheckpointError: If the directory cannot be listed.
    """
    names = [name for _, name in layout.runs(files)]
    if not names:
        raise NoCheckpointError(
            f"{files.where()} does not exist or contains no runs (folders such as run-0001). Pass "
            "the directory of a training job, by default keras_distplug_runs/<name of the script>. "
            "A run with delete_checkpoint=True is deleted when its training finishes."
        )
    if only is None:
        return names
    if only not in names:
        raise NoCheckpointError(
            f"{files.where()} contains no run {only!r}. Its runs: {', '.join(names)}."
        )
    return [only]


def checkpoint_states(files: Files, run: str) -> dict[int, CheckpointState] | None:
    """Returns the status of the run's checkpoints by step; of several of one step, the best.

    The newest few are checked, including their files. For the others, only names are read, so that
    this can be polled during training.

    Args:
        files: A folder that contains the run's folder at any depth, or is the run's folder.
        run: The path of the run's folder, relative to `files`, or `""`.

    Returns:
        A dict by step, or None if the folder is not a run's, such as that of a separate log.

    Raises:
        CheckpointError: If the folder cannot be listed.
    """
    if layout.RECORD not in layout.names(files, run):
        return None
    store = CheckpointStore(files, run)
    found: dict[int, CheckpointState] = {}
    committed = 0
    for place in sorted(layout.places(files, run), key=_age, reverse=True):
        seen = CheckpointState("cut off" if committed else "unfinished", False)
        try:
            names = layout.names(files, store.path(place.name))
        except CheckpointError:
            seen, names = CheckpointState("unreadable", False), []
        if layout.DAMAGED in names:
            seen = CheckpointState("damaged", False)
        elif layout.MANIFEST in names:
            seen = CheckpointState("committed", False)
            if committed < _CHECKED:
                closer = _committed(files, store, place, names, Depth.SIZES)
                if closer is None:
                    continue
                seen = CheckpointState(closer.state, closer.state == "committed")
            committed += 1
        if place.step not in found or found[place.step].state != "committed":
            found[place.step] = seen
    return found


def find_run(files: Files, name: str | None = None) -> SurveyedRun:
    """Returns the run `name`, or by default the run that training would resume.

    Raises:
        NoCheckpointError: If the run does not exist.
        CheckpointError: If the directory cannot be listed.
    """
    names = run_names(files, name)
    return survey_run(files, name or runs.newest_name(files) or names[-1])


def survey_run(files: Files, run: str, depth: Depth = Depth.MANIFESTS) -> SurveyedRun:
    """Returns the run with its checkpoints.

    Raises:
        CheckpointError: If its folder cannot be listed.
    """
    record, reason = None, None
    try:
        record = runs.read_run(files, run).record
    except CheckpointError as error:
        reason = str(error)
    return SurveyedRun(run, record, reason, tuple(list_checkpoints(files, run, depth)))


def list_checkpoints(
    files: Files, run: str, depth: Depth = Depth.MANIFESTS, step: int | str | None = None
) -> Iterator[SurveyedCheckpoint]:
    """Yields the checkpoints of a run, oldest first, checking one at a time.

    Args:
        files: The directory.
        run: The name of the run's folder.
        depth: The depth to which they are checked. Defaults to their manifests.
        step: The step, or the name, of the checkpoints to yield. Defaults to `None`: all.

    Raises:
        CheckpointError: If the run cannot be listed.
    """
    places = sorted(layout.places(files, run), key=_age)
    inside: dict[Place, list[str]] = {}
    unreadable: dict[Place, str] = {}
    for place in places:
        try:
            inside[place] = layout.names(files, f"{run}/{place.name}")
        except CheckpointError as error:  # it concerns this checkpoint only
            inside[place], unreadable[place] = [], str(error)
    newest: dict[str, Place] = {}
    for place, names in inside.items():
        if layout.MANIFEST in names and layout.DAMAGED not in names:
            newest[place.kind] = place
    store = CheckpointStore(files, run)
    for place, names in inside.items():
        if step not in (None, place.step, place.name):
            continue
        if layout.MANIFEST in names or layout.DAMAGED in names:
            seen = _committed(files, store, place, names, depth)
        elif place in unreadable:
            seen = SurveyedCheckpoint(place, "unreadable", 0, reason=unreadable[place])
        else:
            is_old = place.kind in newest and place < newest[place.kind]
            size = _size(files, store.path(place.name), names)
            seen = SurveyedCheckpoint(place, "cut off" if is_old else "unfinished", size)
        if seen is not None:
            yield seen


def _committed(
    files: Files, store: CheckpointStore, place: Place, names: Sequence[str], depth: Depth
) -> SurveyedCheckpoint | None:
    """Returns a checkpoint that is or was committed; None if it has just been deleted."""
    manifest, damage = None, None
    state: State = "committed"
    try:
        manifest = store.read(place.name).manifest
        if layout.DAMAGED not in names and depth > Depth.MANIFESTS:
            store.verify(place.name, deep=depth is Depth.BYTES)
    except CheckpointError as error:
        left = layout.names(files, store.path(place.name))
        if layout.MANIFEST in names and layout.MANIFEST not in left:
            return None
        state = "damaged" if isinstance(error, CorruptCheckpointError) else "unreadable"
        damage = str(error)
    if layout.DAMAGED in names:
        state, damage = "damaged", _recorded_damage(files, store.path(place.name, layout.DAMAGED))
    if manifest is None:
        size = _size(files, store.path(place.name), names)
    else:
        size = sum(shard.bytes for shard in manifest.shards)
    return SurveyedCheckpoint(place, state, size, manifest, damage, layout.DAMAGED in names)


def _recorded_damage(files: Files, path: str) -> str:
    try:
        return str(json.loads(files.read(path))["reason"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{files.where(path)} marks it as damaged, but the reason is unreadable: {error!r}"


def _size(files: Files, path: str, names: Sequence[str]) -> int:
    """Returns the bytes below a checkpoint's folder, which contains a folder per attempt."""
    attempts = [f"{path}/{name}" for name in names if "." not in name]
    shards = [f"{attempt}/{name}" for attempt in attempts for name in layout.names(files, attempt)]
    return sum(_file_size(files, shard) for shard in shards)


def _file_size(files: Files, path: str) -> int:
    try:
        return files.size(path)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise CheckpointError(
            f"{files.where(path)} cannot be read: {error}. {remedy(error)}"
        ) from error


def list_taken(run: SurveyedRun) -> Mapping[str, str]:
    """Returns the names of the checkpoints that a `fit` would restore, and for which `epochs`."""
    if run.record is None:
        return {}
    newest: dict[str, SurveyedCheckpoint] = {}
    for kind in KINDS:
        there = [each for each in run.checkpoints if each.place.kind == kind]
        if committed := run.committed(kind):
            newest[kind] = committed[-1]
        elif any(each.state in ("damaged", "unreadable") for each in there):
            return {}  # resuming would raise an error
    step, final = newest.get("step"), newest.get("final")
    if final is None or final.whole.completion is None:
        return {step.name: "any epochs"} if step else {}
    if step is None or step.place.step < final.place.step:
        return {final.name: "any epochs"}
    epochs = final.whole.completion.epochs
    return {final.name: f"epochs <= {epochs}", step.name: f"epochs > {epochs}"}


def choose(files: Files, run: SurveyedRun, step: int | str | None = None) -> SurveyedCheckpoint:
    """Returns the requested committed checkpoint.

    Args:
        files: The directory, for errors.
        run: The run.
        step: A step, or the name of a checkpoint. Defaults to the newest checkpoint.

    Raises:
        NoCheckpointError: If the checkpoint does not exist.
        CorruptCheckpointError: If it is damaged.
        CheckpointError: If it cannot be read.
    """
    asked = [each for each in run.checkpoints if step in (None, each.place.step, each.name)]
    committed = [each for each in asked if each.state == "committed"]
    if committed and step is None:
        return committed[-1]
    if committed:
        # At the same step, prefer kind "step": callbacks may change the model when training ends.
        return max(committed, key=lambda each: (each.place.kind == "step", each.place.number))
    if asked and (bad := asked[-1]).reason is not None:
        error = CorruptCheckpointError if bad.state == "damaged" else CheckpointError
        raise error(f"{files.where(run.name)}/{bad.name} is {bad.state}: {bad.reason}")
    there = ", ".join(each.name for each in run.committed()) or "none"
    which = "." if step is None else f" {step!r}. Complete checkpoints: {there}."
    raise NoCheckpointError(f"{files.where(run.name)} contains no complete checkpoint{which}")


def choose_best(files: Files, run: SurveyedRun, metric: str, mode: Mode) -> SurveyedCheckpoint:
    """Returns the best committed checkpoint by a metric of the logs; of equal ones, the newest.

    Raises:
        ConfigurationError: If no checkpoint has the metric.
        NoCheckpointError: If no checkpoint is committed.
    """
    committed = {each.name: each for each in run.committed()}
    if not committed:
        raise NoCheckpointError(f"{files.where(run.name)} contains no complete checkpoint.")
    kept = [
        RetentionEntry(name, each.place.step, each.whole.metrics)
        for name, each in committed.items()
    ]
    if best := rated(kept, metric, mode)[-1:]:
        return committed[best[0]]
    known = sorted({name for each in committed.values() for name in each.whole.metrics})
    raise ConfigurationError(
        f"Expected a metric that a checkpoint in {files.where(run.name)} has, with a value other "
        f"than NaN. Received: {metric!r}. Its checkpoints have these metrics: "
        f"{', '.join(known) or 'none'}."
    )


def _age(place: Place) -> tuple[int, bool, int]:
    """Returns a sort key by age: a final checkpoint is newer than one of the same step."""
    return place.step, place.kind == "final", place.number
