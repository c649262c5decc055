"""Runs: the folders in which checkpoints lie."""

from __future__ import annotations

import uuid
from dataclasses import asdict, astuple, dataclass

from keras_distplug.core.errors import CheckpointError, CorruptCheckpointError, SaveError
from keras_distplug.core.hints import require_types
from keras_distplug.storage import layout
from keras_distplug.storage.files import Files
from keras_distplug.storage.sealed import seal, unseal


@dataclass(frozen=True)
class Identity:
    """What a `fit` trains, as hashes; empty for what is not known.

    Args:
        model: Of the classes of the model's layers and optimizers.
        shapes: Of its weights.
        data: Of its training data.
    """

    model: str = ""
    shapes: str = ""
    data: str = ""

    def may_be(self, other: Identity) -> bool:
        """Whether nothing that is known of both differs."""
        return not any(
            one and another and one != another
            for one, another in zip(astuple(self), astuple(other), strict=True)
        )

    def is_surely(self, other: Identity) -> bool:
        """Whether all is known of both, and is the same."""
        return bool(self.model and self.data and other.data) and self.may_be(other)


UNKNOWN = Identity()


@dataclass(frozen=True)
class RunRecord:
    """What is known when a run begins.

    Args:
        run_id: Different for every run.
        job: The supervised job that began it, if one did.
        seed: From which the order of its data is drawn.
        created_utc: ISO 8601.
        place: 1 for the run of a script's first `fit` in the directory, 2 for that of its second,
            and so on.
        first: The `run_id` of the run with place 1, unless it is this one.
        model: As in `Identity`.
        shapes: As in `Identity`.
        data: As in `Identity`.
    """

    run_id: str
    job: str | None
    seed: int
    created_utc: str
    place: int = 1
    first: str = ""
    model: str = ""
    shapes: str = ""
    data: str = ""

    @property
    def identity(self) -> Identity:
        return Identity(self.model, self.shapes, self.data)

    @property
    def sequence(self) -> str:
        """The same for the runs of all `fit`s of a script."""
        return self.first or self.run_id


@dataclass(frozen=True)
class Run:
    """A run: the name of its folder, and its record."""

    name: str
    record: RunRecord

    @property
    def number(self) -> int:
        """That of its folder."""
        return int(self.name.partition("-")[2])


def begin_run(
    files: Files,
    *,
    job: str | None,
    seed: int,
    after: Run | None = None,
    identity: Identity = UNKNOWN,
) -> Run:
    """Begins a run in a new folder.

    Args:
        files: The directory.
        job: As in `RunRecord`, here and below.
        seed: From which the order of its data is drawn.
        after: The run of the `fit` before, if it is not the script's first.
        identity: What it trains.

    Raises:
        SaveError: If that cannot be written.
        CheckpointError: If the folder cannot be listed.
    """
    place, first = (after.record.place + 1, after.record.sequence) if after else (1, "")
    record = RunRecord(uuid.uuid4().hex, job, seed, layout.now(), place, first, *astuple(identity))
    # A folder without a record is what is left of a run that was deleted.
    number = max((number for number, _ in layout.runs(files)), default=0)
    text = seal(asdict(record))
    while True:
        number += 1
        name = f"run-{number:04d}"
        try:
            files.create(f"{name}/{layout.RECORD}", [text.encode()])
        except FileExistsError:
            continue
        except OSError as error:
            raise SaveError(
                f"A new run could not be begun in {files.where()}: {error}. Give a folder that "
                "can be written."
            ) from error
        return Run(name, record)


def newest_run(files: Files) -> Run | None:
    """The newest run that holds a checkpoint, or else the newest one, or None.

    A run that was begun and ended in an error before its first checkpoint hides no other.

    Raises:
        CheckpointError: If it cannot be read.
        CorruptCheckpointError: If its record is damaged.
    """
    name = newest_name(files)
    return None if name is None else read_run(files, name)


def newest_name(files: Files) -> str | None:
    """The name of `newest_run`, whatever its record says.

    Raises:
        CheckpointError: If the folder cannot be listed.
    """
    recorded = [
        name for _, name in layout.runs(files) if layout.RECORD in layout.names(files, name)
    ]
    with_checkpoint = [name for name in recorded if _holds_checkpoint(files, name)]
    return next(reversed(with_checkpoint or recorded), None)


def _holds_checkpoint(files: Files, run: str) -> bool:
    return any(
        layout.MANIFEST in layout.inside(files, f"{run}/{place.name}")
        for place in layout.places(files, run)
    )


def sequence_of(files: Files, run: Run) -> dict[int, Run]:
    """Returns the runs of all `fit`s of the script that made `run` by their places, in order.

    A run that restarts a place replaces the earlier run there and all runs after that.

    Raises:
        CheckpointError: If one cannot be read.
        CorruptCheckpointError: If the record of one is damaged.
    """
    found: dict[int, Run] = {}
    for _, name in layout.runs(files):
        if layout.RECORD not in layout.names(files, name):
            continue
        other = read_run(files, name)  # another one than `run`, if that was deleted
        if other.record.sequence == run.record.sequence:
            place = other.record.place
            found = {each: found[each] for each in found if each < place} | {place: other}
    return found


def read_run(files: Files, name: str) -> Run:
    """The run in the folder `name`.

    Raises:
        CheckpointError: If it cannot be read.
        CorruptCheckpointError: If its record is damaged.
    """
    path = f"{name}/{layout.RECORD}"
    try:
        text = files.read(path)
    except OSError as error:
        raise CheckpointError(
            f"{files.where(path)} cannot be read: {error}. All workers must see the same folder; "
            "if it is there, check its permissions."
        ) from error
    try:
        record = RunRecord(**unseal(text))
        require_types(record)
        return Run(name, record)
    except (ValueError, TypeError) as error:
        raise CorruptCheckpointError(
            f"{files.where(path)} is damaged: {error!r}. Give resume=False to start a new run "
            "beside it, or put the file back from a copy."
        ) from error
