"""Runs, and the checkpoints of a run.

    <directory>/
      run-0001/
        RUN.json                            who began it, and the seed of its data
        step-00000042/                      a checkpoint of a run under way
          3f0c.../rank-0.safetensors        written first, in a folder of this attempt's own
          MANIFEST.json                     written last: now the checkpoint exists
        final-00000210/                     the same, of a run that has reached its end

No file is ever changed. A save that is cut off leaves a folder without a manifest, which does not
count and goes with the next cleaning. A checkpoint whose bytes are not those that were committed
gets a DAMAGED.json, is named to the user, and stays as it is.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import re
import uuid
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Literal

import numpy as np

from keras_distplug.core.errors import CheckpointError, CorruptCheckpointError, SaveError
from keras_distplug.core.manifest import Manifest, Shard, digest_of
from keras_distplug.core.state import TrainState
from keras_distplug.storage import codec
from keras_distplug.storage.files import Files
from keras_distplug.storage.retention import expired

Kind = Literal["step", "final"]

_RUN = re.compile(r"run-(\d{4,})")
_CHECKPOINT = re.compile(r"(step|final)-(\d{8,})(?:-(\d+))?")
_RECORD, _MANIFEST, _DAMAGED = "RUN.json", "MANIFEST.json", "DAMAGED.json"
_PACKAGES = ("keras-distplug", "keras", "tensorflow", "tensorflow-cpu")


@dataclass(frozen=True)
class RunRecord:
    """What is known when a run begins.

    Args:
        run_id: Different for every run.
        job: The supervised job that began it, if one did.
        seed: From which the order of its data is drawn.
        created_utc: ISO 8601.
    """

    run_id: str
    job: str | None
    seed: int
    created_utc: str


@dataclass(frozen=True)
class Run:
    """A run: the name of its folder, and its record."""

    name: str
    record: RunRecord


@dataclass(frozen=True)
class Stored:
    """A checkpoint that was read and verified.

    Args:
        name: The name of its folder.
        manifest: All but the arrays.
        arrays: Values by key, in the model's order. Not to be written to.
    """

    name: str
    manifest: Manifest
    arrays: Mapping[str, np.ndarray]


@dataclass(frozen=True, order=True)
class _Place:
    """Where a checkpoint stands: the `number`-th one that was made of its step."""

    step: int
    number: int
    name: str


def begin_run(files: Files, *, job: str | None, seed: int) -> Run:
    """Begins a run in a new folder.

    Raises:
        SaveError: If that cannot be written.
        CheckpointError: If the folder cannot be listed.
    """
    record = RunRecord(uuid.uuid4().hex, job, seed, _now())
    # A folder without a record is what is left of a run that was deleted.
    number = max((number for number, _ in _runs(files)), default=0)
    text = json.dumps({**asdict(record), "sha256": digest_of(asdict(record))}, indent=1)
    while True:
        number += 1
        name = f"run-{number:04d}"
        try:
            files.create(f"{name}/{_RECORD}", text.encode())
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
    recorded = [name for _, name in _runs(files) if _RECORD in _names(files, name)]
    with_checkpoint = [name for name in recorded if _holds_checkpoint(files, name)]
    newest = (with_checkpoint or recorded)[-1:]
    return read_run(files, newest[0]) if newest else None


def _holds_checkpoint(files: Files, run: str) -> bool:
    folders = (name for name in _names(files, run) if _CHECKPOINT.fullmatch(name))
    return any(_MANIFEST in _names(files, f"{run}/{name}") for name in folders)


def read_run(files: Files, name: str) -> Run:
    """The run in the folder `name`.

    Raises:
        CheckpointError: If it cannot be read.
        CorruptCheckpointError: If its record is damaged.
    """
    path = f"{name}/{_RECORD}"
    try:
        text = files.read(path)
    except OSError as error:
        raise CheckpointError(
            f"{files.where(path)} cannot be read: {error}. All workers must see the same folder; "
            "if it is there, check its permissions."
        ) from error
    try:
        body = json.loads(text)
        if body.pop("sha256") != digest_of(body):
            raise ValueError("it was changed after it was written")
        return Run(name, RunRecord(**body))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"{files.where(path)} is damaged: {error!r}. Give resume=False to begin a new run "
            "beside it, or put the file back from a copy."
        ) from error


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        files: The folder that holds the run's folder.
        run_name: The name of the run's folder.
        keep_last: How many checkpoints of each kind stay, at least 1.
        world_size: Workers that train; recorded in each manifest.
    """

    def __init__(
        self, files: Files, run_name: str, *, keep_last: int = 2, world_size: int = 1
    ) -> None:
        if keep_last < 1:
            raise ValueError(f"`keep_last` must be >= 1. Received: {keep_last}")
        self._files = files
        self._run = run_name
        self._keep_last = keep_last
        self._world_size = world_size

    def save(self, state: TrainState) -> Manifest:
        """Writes a checkpoint: shards, then the manifest. Then deletes those beyond `keep_last`.

        A checkpoint of this step that is there already stays; if it says something else, the new
        one stands beside it and is the newer one.

        Raises:
            SaveError: If it could not be committed, or cannot be read back when it is to replace
                old ones. Those committed before are untouched.
        """
        kind: Kind = "step" if state.completion is None else "final"
        try:
            manifest = self._commit(kind, state)
        except (OSError, CheckpointError) as error:
            raise SaveError(
                f"The checkpoint of step {state.cursor.step} could not be written to "
                f"{self._where()}: {error}. Checkpoints committed before are untouched. Make room, "
                "or mend the storage, and start the script again: it goes on from the newest one."
            ) from error
        try:
            self._clean(kind)
        except CorruptCheckpointError as error:
            raise SaveError(
                f"The storage does not give back what was written to it: {error} Checkpoints "
                "committed before are untouched. Mend the storage, and start the script again: it "
                "goes on from the newest one that is whole."
            ) from error
        except (OSError, CheckpointError) as error:
            warnings.warn(
                f"Old checkpoints in {self._where()} could not be deleted: {error}. They take "
                "room, nothing else.",
                stacklevel=2,
            )
        return manifest

    def newest(self, kind: Kind) -> Stored | None:
        """The newest checkpoint of `kind` that verifies; None if there never was one.

        One that does not verify is set aside and named in a warning, and the one before is tried.

        Raises:
            CorruptCheckpointError: If there are checkpoints of `kind` and all are damaged.
            CheckpointError: If one cannot be read; that may pass, so it is not set aside.
        """
        damaged = []
        for name in reversed(self._names(kind)):
            if self._is_damaged(name):
                damaged.append(name)
                continue
            if not self._is_committed(name):
                continue
            try:
                return self.read(name)
            except CorruptCheckpointError as error:
                self._set_aside(name, error)
                damaged.append(name)
        if damaged:
            raise CorruptCheckpointError(
                f"All {kind} checkpoints in {self._where()} are damaged: {', '.join(damaged)}. "
                f"{_DAMAGED} in each says how. Give resume=False to begin a new run beside them, "
                "or put one back from a copy and delete its "
                f"{_DAMAGED}."
            )
        return None

    def read(self, name: str) -> Stored:
        """The checkpoint in the folder `name`, verified.

        Raises:
            CorruptCheckpointError: If its bytes are not those that were committed.
            CheckpointError: If it cannot be read.
        """
        manifest = self._manifest(name)
        contents: dict[str, bytes] = {}
        for shard, data in self._shards(name, manifest):
            contents |= codec.decode(data, self._where(name, shard.file))
        arrays = codec.arrays_of(contents, manifest.variables, self._where(name))
        return Stored(name, manifest, arrays)

    def delete_run(self) -> None:
        """Deletes the run with all its checkpoints."""
        try:
            # Without its record the rest does not count, should this be cut off.
            self._files.delete(f"{self._run}/{_RECORD}")
            self._files.delete(self._run)
        except OSError as error:
            raise CheckpointError(
                f"{self._where()} could not be deleted: {error}. Delete it by hand."
            ) from error

    # Writing

    def _commit(self, kind: Kind, state: TrainState) -> Manifest:
        attempt = uuid.uuid4().hex
        data = codec.encode(state.arrays)
        shard = Shard(f"{attempt}/rank-0.safetensors", len(data), codec.xxh3_128(data))
        manifest = Manifest(
            cursor=state.cursor,
            variables=codec.specs_of(state.arrays),
            shards=(shard,),
            world_size=self._world_size,
            nonce=attempt,
            created_utc=_now(),
            versions=_versions(),
            history=state.history,
            history_epochs=state.history_epochs,
            data=state.data,
            stop_training=state.stop_training,
            completion=state.completion,
            how_built=state.how_built,
        )
        text = manifest.to_json()
        name, is_new = self._name_for(kind, manifest)
        if not is_new:
            return self._manifest(name)
        try:
            self._files.create(self._path(name, shard.file), data)
            self._files.create(self._path(name, _MANIFEST), text.encode())
        except OSError:
            self._forget(self._path(name, attempt))
            raise
        return manifest

    def _name_for(self, kind: Kind, manifest: Manifest) -> tuple[str, bool]:
        """The folder for `manifest`, and False if it stands there already."""
        step = manifest.cursor.step
        same = [place for place in self._places(kind) if place.step == step]
        if not same:
            return f"{kind}-{step:08d}", True
        last = same[-1]
        if not self._is_damaged(last.name):
            if not self._is_committed(last.name):
                return last.name, True
            if self._says(last.name, manifest):
                return last.name, False
        return f"{kind}-{step:08d}-{last.number + 1}", True

    def _says(self, name: str, manifest: Manifest) -> bool:
        """Does the committed checkpoint `name` hold what `manifest` does, undamaged?"""
        try:
            stored = self._manifest(name)
            for _ in self._shards(name, stored):
                pass
        except CheckpointError:
            return False
        return _content(stored) == _content(manifest)

    def _clean(self, kind: Kind) -> None:
        names = [name for name in self._names(kind) if not self._is_damaged(name)]
        committed = [name for name in names if self._is_committed(name)]
        newest = committed[-1]
        old = expired(committed, self._keep_last)
        cut_off = [name for name in names[: names.index(newest)] if name not in committed]
        if not old and not cut_off:
            return
        try:
            self.read(newest)
        except CorruptCheckpointError as error:
            self._set_aside(newest, error)
            raise
        for name in (*old, *cut_off):
            # Without its manifest the rest does not count, should this be cut off.
            self._files.delete(self._path(name, _MANIFEST))
            self._files.delete(self._path(name))

    def _forget(self, path: str) -> None:
        try:
            self._files.delete(path)
        except OSError as error:
            warnings.warn(
                f"{self._files.where(path)} is left of a checkpoint that failed and could not be "
                f"deleted: {error}",
                stacklevel=2,
            )

    # Reading

    def _manifest(self, name: str) -> Manifest:
        text = self._read(name, _MANIFEST)
        try:
            return Manifest.from_json(text.decode(), self._where(name, _MANIFEST))
        except UnicodeDecodeError as error:
            raise CorruptCheckpointError(
                f"{self._where(name, _MANIFEST)} is no text: {error}"
            ) from error

    def _shards(self, name: str, manifest: Manifest) -> Iterator[tuple[Shard, bytes]]:
        for shard in manifest.shards:
            data = self._read(name, shard.file)
            where = self._where(name, shard.file)
            if len(data) != shard.bytes:
                raise CorruptCheckpointError(
                    f"{where} has {len(data)} bytes; {shard.bytes} were committed."
                )
            if (found := codec.xxh3_128(data)) != shard.xxh3_128:
                raise CorruptCheckpointError(
                    f"{where} has changed since it was written: XXH3 is {found}, "
                    f"{shard.xxh3_128} was committed."
                )
            yield shard, data

    def _read(self, name: str, file: str) -> bytes:
        try:
            return self._files.read(self._path(name, file))
        except FileNotFoundError as error:
            raise CorruptCheckpointError(f"{self._where(name, file)} is missing.") from error
        except OSError as error:
            raise CheckpointError(
                f"{self._where(name, file)} cannot be read: {error}. Check the storage and its "
                "permissions, then start the script again."
            ) from error

    def _places(self, kind: Kind) -> list[_Place]:
        """Folders of checkpoints of `kind`, the oldest first."""
        found = (_CHECKPOINT.fullmatch(name) for name in _names(self._files, self._run))
        return sorted(
            _Place(int(match[2]), int(match[3] or 1), match[0])
            for match in found
            if match and match[1] == kind
        )

    def _names(self, kind: Kind) -> list[str]:
        return [place.name for place in self._places(kind)]

    def _is_committed(self, name: str) -> bool:
        return _MANIFEST in _names(self._files, self._path(name))

    def _is_damaged(self, name: str) -> bool:
        return _DAMAGED in _names(self._files, self._path(name))

    def _set_aside(self, name: str, error: CorruptCheckpointError) -> None:
        warnings.warn(f"The checkpoint {self._where(name)} is set aside: {error}", stacklevel=3)
        note = {"reason": str(error), "found_utc": _now()}
        try:
            self._files.create(self._path(name, _DAMAGED), json.dumps(note, indent=1).encode())
        except FileExistsError:
            pass  # another process found the same
        except OSError as failure:
            warnings.warn(
                f"{self._where(name, _DAMAGED)} could not be written: {failure}", stacklevel=3
            )

    def _path(self, name: str, file: str = "") -> str:
        return f"{self._run}/{name}/{file}" if file else f"{self._run}/{name}"

    def _where(self, name: str = "", file: str = "") -> str:
        return self._files.where(self._path(name, file) if name else self._run)


def _runs(files: Files) -> list[tuple[int, str]]:
    """Numbers and names of the runs' folders, the oldest first."""
    found = (_RUN.fullmatch(name) for name in _names(files))
    return sorted((int(match[1]), match[0]) for match in found if match)


def _names(files: Files, folder: str = "") -> list[str]:
    try:
        return files.names(folder)
    except OSError as error:
        raise CheckpointError(
            f"{files.where(folder)} cannot be listed: {error}. Check the storage and its "
            "permissions, then start the script again."
        ) from error


def _content(manifest: Manifest) -> str:
    """`manifest` without what differs from one attempt to save the same thing to the next."""
    shards = tuple(replace(shard, file=shard.file.rpartition("/")[2]) for shard in manifest.shards)
    # As text, since NaN in a History equals itself there.
    return replace(manifest, shards=shards, nonce="", created_utc="", versions={}).to_json()


@functools.cache
def _versions() -> Mapping[str, str]:
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
