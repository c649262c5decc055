"""Deleting checkpoints by hand, also beside a training that writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from keras_distplug.core.errors import CheckpointError, CorruptCheckpointError
from keras_distplug.storage import layout
from keras_distplug.storage.files import Files
from keras_distplug.storage.retention import Kept, Retention
from keras_distplug.storage.store import CheckpointStore
from keras_distplug.storage.survey import KINDS, Seen, SeenRun, State


@dataclass(frozen=True)
class Outdated:
    """Something that may go.

    Args:
        seen: What.
        why: A checkpoint that no rule keeps, what is left of a save, or a damaged checkpoint.
        newest: The committed checkpoint that stays, and that has to be whole before this goes.
    """

    seen: Seen
    why: Literal["old", "cut off", "damaged"]
    newest: Seen


def outdated(run: SeenRun, retention: Retention, *, damaged: bool = False) -> list[Outdated]:
    """What may go of a run: nothing that is newer than the newest whole checkpoint of its kind,
    for a training may be writing that, and never this one itself.

    Args:
        run: The run, from `checked`.
        retention: What stays of each kind.
        damaged: Whether damaged checkpoints may go. Unreadable ones never do.
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


def checked(files: Files, run: SeenRun, retention: Retention) -> SeenRun:
    """Returns the run after a closer look at what stays in place of what goes: where reading is
    cheap, all bytes of the checkpoint before the newest are verified if `retention` keeps it as one
    of the last. One that is damaged, or cannot be read, is returned as such, so that an older one
    stays instead.

    `prune` verifies the newest itself. Further ones that stay are not verified.

    Args:
        files: The directory.
        run: The run, whose files' sizes were looked at.
        retention: What stays of each kind.
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
            except CheckpointError as error:  # of this one, which hides no others
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


def _expired(committed: Sequence[Seen], retention: Retention) -> tuple[str, ...]:
    return retention.expired(
        [Kept(each.name, each.place.step, each.whole.metrics) for each in committed]
    )


def prune(files: Files, run: str, going: Sequence[Outdated]) -> None:
    """Deletes `going`, once what stays in its stead has been verified.

    From a distant store only the manifest is read for that, and the sizes of the files.

    Raises:
        CorruptCheckpointError: If what stays is damaged; nothing is deleted.
        CheckpointError: If something cannot be read or deleted.
    """
    store = CheckpointStore(files, run)
    for newest in sorted({each.newest.name for each in going}):
        try:
            store.verify(newest, deep=files.traits.is_near)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(
                f"Nothing was deleted of {files.where(run)}, because its newest checkpoint "
                f"{newest} is not whole: {error} If a training replaced it just now, try again."
            ) from error
    for each in going:
        # Without its manifest the rest does not count, should this be cut off.
        store.delete(each.seen.name, layout.MANIFEST)
        store.delete(each.seen.name)
