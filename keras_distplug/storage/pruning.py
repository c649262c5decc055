"""Manual deletion of checkpoints, which is safe even while a training job writes to the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from keras_distplug.core.errors import CheckpointError, CorruptCheckpointError
from keras_distplug.storage import layout
from keras_distplug.storage.files import Files
from keras_distplug.storage.retention import Retention, RetentionEntry
from keras_distplug.storage.store import CheckpointStore
from keras_distplug.storage.survey import KINDS, State, SurveyedCheckpoint, SurveyedRun


@dataclass(frozen=True)
class Outdated:
    """A checkpoint, or the leftovers of one, that may be deleted.

    Args:
        seen: The checkpoint.
        why: The reason: no rule keeps it, its save was interrupted, or it is damaged.
        newest: The committed checkpoint that is kept, and must be intact before this is deleted.
    """

    seen: SurveyedCheckpoint
    why: Literal["old", "cut off", "damaged"]
    newest: SurveyedCheckpoint


def outdated(run: SurveyedRun, retention: Retention, *, damaged: bool = False) -> list[Outdated]:
    """Returns the checkpoints of a run that may be deleted: only ones older than the newest intact
    checkpoint of their kind, because a training job may still be writing newer ones.

    Args:
        run: The run, from `checked`.
        retention: The checkpoints to keep, applied to every kind separately.
        damaged: If `True`, damaged checkpoints may be deleted, too. Unreadable ones are always
            kept. Defaults to `False`.
    """
    found: list[Outdated] = []
    for kind in KINDS:
        committed = run.committed(kind)
        if not committed:
            continue
        newest = committed[-1]
        expired = _expired(committed, retention)
        for each in run.checkpoints:
            if each.place.kind != kind or not each.place < newest.place:
                continue
            if each.name in expired:
                found.append(Outdated(each, "old", newest))
            elif each.state in ("cut off", "unfinished"):
                found.append(Outdated(each, "cut off", newest))
            elif each.state == "damaged" and damaged:
                found.append(Outdated(each, "damaged", newest))
    return found


def checked(files: Files, run: SurveyedRun, retention: Retention) -> SurveyedRun:
    """Returns the run with the second newest checkpoint of every kind verified, if reading is cheap
    and `retention` keeps it as one of the last ones. If it is damaged or cannot be read, its state
    says so, so that an older one is kept instead.

    `prune` verifies the newest itself. Other checkpoints that are kept are not verified.

    Args:
        files: The directory.
        run: The run, with its files' sizes checked.
        retention: The checkpoints to keep, applied to every kind separately.
    """
    if not files.traits.is_near or retention.keep_last < 2:
        return run
    store = CheckpointStore(files, run.name)
    for kind in KINDS:
        while _expired(committed := run.committed(kind), retention):
            before_newest = committed[-2]
            try:
                store.verify(before_newest.name)
                break
            except CheckpointError as error:  # it concerns this checkpoint only
                state: State = (
                    "damaged" if isinstance(error, CorruptCheckpointError) else "unreadable"
                )
                damaged = replace(before_newest, state=state, reason=str(error))
            run = replace(
                run,
                checkpoints=tuple(
                    damaged if each is before_newest else each for each in run.checkpoints
                ),
            )
    return run


def _expired(committed: Sequence[SurveyedCheckpoint], retention: Retention) -> tuple[str, ...]:
    return retention.expired(
        [RetentionEntry(each.name, each.place.step, each.whole.metrics) for each in committed]
    )


def prune(files: Files, run: str, going: Sequence[Outdated]) -> None:
    """Deletes the checkpoints in `going`, after verifying the newest ones that are kept.

    In a remote store, only the manifest and the sizes of the files are verified.

    Raises:
        CorruptCheckpointError: If a checkpoint that is kept is damaged; nothing is deleted.
        CheckpointError: If something cannot be read or deleted.
    """
    store = CheckpointStore(files, run)
    for newest in sorted({each.newest.name for each in going}):
        try:
            store.verify(newest, deep=files.traits.is_near)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(
                f"Nothing was deleted from {files.where(run)}, because its newest checkpoint "
                f"{newest} is not intact: {error} If a running job has just replaced that "
                "checkpoint, try again. Otherwise, move its folder out of the run, so that an "
                "older checkpoint counts as the newest."
            ) from error
    for each in going:
        # Delete the manifest first: if this is interrupted, the rest counts as no checkpoint.
        store.delete(each.seen.name, layout.MANIFEST)
        store.delete(each.seen.name)
