"""Runs: the folders that contain checkpoints."""

from __future__ import annotations

import uuid
from dataclasses import astuple, dataclass

from keras_distplug.core.errors import CheckpointError, CorruptCheckpointError, SaveError
from keras_distplug.core.hints import require_types
from keras_distplug.storage import layout
from keras_distplug.storage.files import Files
from keras_distplug.storage.sealed import seal, unseal


@dataclass(frozen=True)
class Identity:
    """Hashes that identify what a `fit` trains; empty if not known.

    Args:
        model: A hash of the classes of the model's layers and optimizers.
        shapes: A hash of the shapes of its weights.
        data: A hash of its training data.
    """

    model: str = ""
    shapes: str = ""
    data: str = ""

    def may_be(self, other: Identity) -> bool:
        """True if no hash that is known of both differs."""
        return not any(
            one and another and one != another
            for one, another in zip(astuple(self), astuple(other), strict=True)
        )

    def is_surely(self, other: Identity) -> bool:
        """True if all hashes are known of both and are the same."""
        return bool(self.model and self.data and other.data) and self.may_be(other)


UNKNOWN = Identity()


@dataclass(frozen=True)
class RunRecord:
    """The record that is written when a run starts.

    Args:
        run_id: A unique identifier.
        job: The supervised job that started it, if any.
        seed: The seed of the order of its data.
        created_utc: The time of its start, in ISO 8601.
        place: 1 for the run of a script's first `fit` in the directory, 2 for that of its second,
            and so on.
        first: The `run_id` of the run with place 1, unless it is this one.
        model: The hash of the model, as in `Identity`.
        shapes: The hash of the shapes, as in `Identity`.
        data: The hash of the data, as in `Identity`.
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
        """An identifier shared by the runs of all `fit`s of a script."""
        return self.first or self.run_id


@dataclass(frozen=True)
class Run:
    """A run: the name of its folder, and its record."""

    name: str
    record: RunRecord

    @property
    def number(self) -> int:
        """The number of its folder."""
        return int(self.name.partition("-")[2])


def create_run(
    files: Files,
    *,
    job: str | None,
    seed: int,
    after: Run | None = None,
    identity: Identity = UNKNOWN,
) -> Run:
    """Starts a run in a new folder.

    Args:
        files: The directory.
        job: The supervised job that starts it, if any.
        seed: The seed of the order of its data.
        after: The run of the previous `fit` of the script. Defaults to `None`: this is the first.
        identity: Hashes of its model and data. Defaults to `UNKNOWN`.

    Raises:
        SaveError: If the record cannot be written.
        CheckpointError: If the folder cannot be listed.
    """
    place, first = (after.record.place + 1, after.record.sequence) if after else (1, "")
    record = RunRecord(uuid.uuid4().hex, job, seed, layout.now(), place, first, *astuple(identity))
    # A folder without a record also counts: it may be left of a run that was deleted.
    number = max((number for number, _ in layout.runs(files)), default=0)
    text = seal(vars(record))
    while True:
        number += 1
        name = f"run-{number:04d}"
        try:
            files.create(f"{name}/{layout.RECORD}", [text.encode()])
        except FileExistsError:
            continue
        except OSError as error:
            raise SaveError(
                f"A new run could not be started in {files.where()}: {error}. Check the storage, "
                "its permissions and its free space, or choose another folder."
            ) from error
        return Run(name, record)


def newest_run(files: Files) -> Run | None:
    """Returns the newest run that has a checkpoint, or else the newest run, or None.

    So a run that failed before its first checkpoint does not hide an earlier one.

    Raises:
        CheckpointError: If it cannot be read.
        CorruptCheckpointError: If its record is damaged.
    """
    name = newest_name(files)
    return None if name is None else read_run(files, name)


def newest_name(files: Files) -> str | None:
    """Returns the name of `newest_run`, without reading its record.

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


def get_sequence(files: Files, run: Run) -> dict[int, Run]:
    """Returns the runs of all `fit`s of the script that made `run`, by place, in order.

    A run that restarts a place replaces the earlier run at that place and all runs after it.

    Raises:
        CheckpointError: If one cannot be read.
        CorruptCheckpointError: If the record of one is damaged.
    """
    found: dict[int, Run] = {}
    for _, name in layout.runs(files):
        if layout.RECORD not in layout.names(files, name):
            continue
        other = read_run(files, name)  # not `run` itself, if its folder was reused
        if other.record.sequence == run.record.sequence:
            place = other.record.place
            found = {each: found[each] for each in found if each < place} | {place: other}
    return found


def read_run(files: Files, name: str) -> Run:
    """Returns the run in the folder `name`.

    Raises:
        CheckpointError: If it cannot be read.
        CorruptCheckpointError: If its record is damaged.
    """
    path = f"{name}/{layout.RECORD}"
    try:
        text = files.read(path)
    except OSError as error:
        raise CheckpointError(
            f"{files.where(path)} cannot be read: {error}. Check that the file exists and that its "
            "permissions allow reading it. During training, every worker must see this folder."
        ) from error
    try:
        record = RunRecord(**unseal(text))
        require_types(record)
        return Run(name, record)
    except (ValueError, TypeError) as error:
        raise CorruptCheckpointError(
            f"{files.where(path)} is damaged: {error}. Restore the file from a backup, or start a "
            "new run next to it by restarting the training script with resume=False."
        ) from error
