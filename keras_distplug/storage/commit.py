"""How the workers of a run write a checkpoint together.

Every worker writes its share of the bytes; of very many, some do. Each tells the first one what it
wrote, which writes the manifest once all shares are there: no collective, so that all of this may
go on in the background of training. A worker that fails tells that, too; then there is no manifest.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any, TypeVar

import stamina

from keras_distplug.core.errors import (
    AgreementError,
    CheckpointError,
    CorruptCheckpointError,
    FencedError,
    OtherRunError,
    SaveError,
)
from keras_distplug.core.protocols import Exchange
from keras_distplug.core.state import TrainState
from keras_distplug.storage import codec, layout
from keras_distplug.storage.ahead import in_order
from keras_distplug.storage.files import Files
from keras_distplug.storage.manifest import Manifest, Shard
from keras_distplug.storage.meter import Meter
from keras_distplug.storage.ownership import Ownership
from keras_distplug.storage.sealed import digest_of, unwritable
from keras_distplug.storage.store import CheckpointStore

_PACKAGES = (
    *("keras-distplug", "keras", "keras-nightly"),
    *("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu"),
)
_ALL_WRITE = 64  # workers, each of which writes a share, however small it is
_SHARE_BYTES = 4 * 2**20  # of more workers not so many write that shares get smaller than this
_FAILURES = (OSError, CheckpointError, AgreementError)
T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """The workers that write a checkpoint together.

    Args:
        rank: This worker's place; 0 writes the manifest.
        size: How many there are.
        exchange: How they tell each other.
        timeout_s: How long one waits for another's share.
    """

    rank: int
    size: int
    exchange: Exchange
    timeout_s: float = 600.0


class Writer:
    """Writes the checkpoints of one run.

    Args:
        files: The folder that holds the run's folder.
        store: The run's checkpoints.
        team: Who writes.
        ownership: That of the worker that writes manifests. Defaults to `None`: nothing else
            writes there.
    """

    def __init__(
        self,
        files: Files,
        store: CheckpointStore,
        team: Team,
        ownership: Ownership | None = None,
    ) -> None:
        self._files = files
        self._store = store
        self._team = team
        self._ownership = ownership
        self._written: dict[int, tuple[str, Shard]] = {}  # by share: where it was written last
        self.meter = Meter()  # of this worker's share of the save under way

    @staticmethod
    def new_attempt() -> str:
        """What the attempts of a training begin with, and those of no other one."""
        return uuid.uuid4().hex

    def save(self, state: TrainState, attempt: str) -> None:
        """Writes a checkpoint, together with all other workers. Then deletes what need not stay.

        Args:
            state: The same on all workers, but for what the manifest says, which is that of the
                first one's.
            attempt: The same on all workers, and different for every save of the run.

        Raises:
            SaveError: If it could not be committed, or cannot be read back when it is to replace
                old ones. Those committed before are untouched.
            FencedError: On all workers, if another process has taken the directory over.
        """
        try:
            if self._team.rank == 0:
                self._lead(state, attempt)
            else:
                self._follow(state, attempt)
        except FencedError:
            raise
        except _FAILURES as error:
            self._written = {}
            raise SaveError(
                f"The checkpoint of step {state.cursor.step} could not be written to "
                f"{self._store.where()}: {error} Earlier checkpoints are intact; a restarted run "
                f"resumes from the newest one. {_remedy(error)}".rstrip()
            ) from error

    def _lead(self, state: TrainState, attempt: str) -> None:
        kind: layout.Kind = "step" if state.completion is None else "final"
        name = self._tell(
            f"{attempt}/folder", lambda: self._store.new_place(kind, state.cursor.step).name
        )
        self._tell(f"{attempt}/end", lambda: self._commit(state, name, kind, attempt))
        try:
            if self._ownership is not None:
                self._ownership.require_recent()
            self._store.clear_other_attempts(name, attempt)
            self._store.clean(kind)
        except (CorruptCheckpointError, FencedError):
            raise
        except CheckpointError as error:
            warnings.warn(
                f"Old checkpoints in {self._store.where()} were not deleted: {error} They take "
                "room, nothing else.",
                stacklevel=2,
            )

    def _follow(self, state: TrainState, attempt: str) -> None:
        name = self._hear(f"{attempt}/folder")
        self._tell(
            f"{attempt}/shards/{self._team.rank}",
            lambda: {
                "shards": [asdict(shard) for shard in self._write_share(state, name, attempt)],
                "variables": _fingerprint(state),
            },
        )
        self._hear(f"{attempt}/end")

    def _commit(self, state: TrainState, name: str, kind: layout.Kind, attempt: str) -> None:
        try:
            shards = self._all_shares(state, name, attempt)
            manifest = self._manifest(state, shards, attempt)
            self._publish_owned(
                self._store.path(name, layout.MANIFEST), _verified(manifest).encode()
            )
            self._store.note_committed(name, manifest)
        except FencedError:
            raise  # what is there is another process's now
        except Exception:
            self._make_room(kind)
            raise

    def _publish_owned(self, path: str, text: bytes) -> None:
        if self._ownership is None:
            self._publish(path, text)
            return
        self._ownership.require()
        self._publish(path, text)
        try:
            # If this process was stopped just now, between the two.
            self._ownership.require_recent()
        except FencedError:
            with contextlib.suppress(OSError):
                self._files.delete(path)
            raise

    def _publish(self, path: str, text: bytes) -> None:
        def create() -> None:
            try:
                self._files.create(path, [text])
            except FileExistsError:
                # Ours, if only the storage's answer was lost.
                if self._files.read(path) != text:
                    raise OtherRunError(
                        f"{self._files.where(path)} already exists, and isn't from this run."
                    ) from None

        _retried(create)

    def _all_shares(self, state: TrainState, name: str, attempt: str) -> list[Shard]:
        shards, failures = [], []
        # All are waited for: nothing of a save is deleted while a worker still writes it.
        for rank in range(self._team.size):
            try:
                if rank == 0:
                    shards += self._write_share(state, name, attempt)
                else:
                    said = self._hear(f"{attempt}/shards/{rank}")
                    _require_same(_fingerprint(state), said["variables"], rank)
                    shards += [Shard(**each) for each in said["shards"]]
            except _FAILURES as error:
                failures.append(error)
        if self._team.size > 1:
            # Who keeps what was told keeps it as long as the job lives.
            self._team.exchange.forget(f"{attempt}/shards")
        if failures:
            raise failures[0]
        return shards

    def _write_share(self, state: TrainState, name: str, attempt: str) -> list[Shard]:
        variables = codec.specs_of(state.arrays)
        traits = self._files.traits
        writers = _writers(codec.bytes_of(variables), self._team.size)
        place = _place_of(self._team.rank, writers, self._team.size)
        if place is None:
            self.meter.begin(0)
            return []
        files = codec.files_for(variables, writers, traits.file_bytes)
        self.meter.begin(codec.bytes_of(variables) // writers)
        numbers = itertools.count(1)

        def new_file() -> str:
            # One more at each try: the one before may have written its file, and only the
            # storage's answer was lost.
            return layout.shard_file(attempt, self._team.rank, next(numbers))

        def write(share: int) -> Shard:
            pieces = codec.share(variables, share, count)
            # A run mostly ends as its last step left it, which was saved a moment ago.
            if state.completion is not None and self._is_written(share, pieces, state):
                source, shard = self._written[share]
                file = new_file()
                with contextlib.suppress(OSError):  # then it is written once more
                    self._files.copy(source, self._store.path(name, file))
                    self.meter.add(shard.bytes)
                    return replace(shard, file=file)
            file = new_file()
            path = self._store.path(name, file)
            parts = codec.Hashed(codec.encode(pieces, state.arrays))
            self._create(path, parts)
            shard = Shard(file, parts.bytes, parts.xxh3_128)
            self._written[share] = path, shard
            return shard

        count = files * writers
        mine = range(files * place, files * (place + 1))
        jobs = (functools.partial(_retried, functools.partial(write, share)) for share in mine)
        return list(in_order(jobs, traits.at_once))

    def _create(self, path: str, parts: codec.Hashed) -> None:
        if not self._files.traits.is_near:
            # All parts are asked for before the first one is sent.
            self._files.create(path, parts)
            self.meter.add(parts.bytes)
            return
        try:
            self._files.create(path, _metered(parts, self.meter))
        except BaseException:
            self.meter.add(-parts.bytes)  # they are written once more
            raise

    def _is_written(self, share: int, pieces: Sequence[codec.Piece], state: TrainState) -> bool:
        """Has a save before written the same?"""
        if share not in self._written:
            return False
        parts = codec.Hashed(codec.encode(pieces, state.arrays))
        deque(parts, maxlen=0)
        _, shard = self._written[share]
        return (parts.bytes, parts.xxh3_128) == (shard.bytes, shard.xxh3_128)

    def _manifest(self, state: TrainState, shards: list[Shard], attempt: str) -> Manifest:
        return Manifest(
            cursor=state.cursor,
            variables=codec.specs_of(state.arrays),
            shards=tuple(shards),
            world_size=self._team.size,
            nonce=attempt,
            created_utc=layout.now(),
            versions=_versions(),
            history=state.history,
            history_epochs=state.history_epochs,
            metrics=state.metrics,
            other_logs=state.other_logs,
            data=state.data,
            stop_training=state.stop_training,
            completion=state.completion,
            how_built=state.how_built,
            callbacks=state.callbacks,
            random=state.random,
        )

    def _make_room(self, kind: layout.Kind) -> None:
        try:
            if self._ownership is not None:
                self._ownership.require()
            # What killed ones have left, too: on a small disk that could keep out every save, and
            # else it is cleaned up after one.
            self._store.clear_cut_off(kind)
        except FencedError:
            raise
        except CheckpointError as error:
            warnings.warn(f"What is left of a checkpoint that failed stays: {error}", stacklevel=2)

    def _tell(self, topic: str, make: Callable[[], T]) -> T:
        """Tells the others what `make` gives, or why it fails."""
        try:
            value = make()
        except Exception as error:
            kind = "fenced" if isinstance(error, FencedError) else "failed"
            told = {kind: str(error), "remedy": _remedy(error)}
            self._team.exchange.tell(topic, json.dumps(told))
            raise
        self._team.exchange.tell(topic, json.dumps({"value": value}))
        return value

    def _hear(self, topic: str) -> Any:
        said = json.loads(self._team.exchange.hear(topic, self._team.timeout_s))
        if "fenced" in said:
            raise FencedError(said["fenced"])
        if "failed" in said:
            raise _ToldError(said["failed"], said["remedy"])
        return said["value"]


def _writers(size: int, workers: int) -> int:
    """How many of `workers` write a state of `size` bytes. Whoever takes it up reads each file, so
    that their number must not grow with the workers."""
    return min(workers, max(_ALL_WRITE, size // _SHARE_BYTES))


def _place_of(rank: int, writers: int, workers: int) -> int | None:
    """Which of the writers this worker is; None if it is none. They are spread over all of them,
    and so over the machines."""
    place = -(-rank * writers // workers)
    return place if place < writers and place * workers // writers == rank else None


def _metered(parts: codec.Hashed, meter: Meter) -> Iterator[memoryview]:
    for part in parts:
        meter.add(part.nbytes)
        yield part


def _verified(manifest: Manifest) -> str:
    """The manifest's text, which its reader takes."""
    try:
        text = manifest.to_json()
    except (TypeError, ValueError, RecursionError) as error:
        where = unwritable(vars(manifest)) or ""
        raise CheckpointError(
            f"This checkpoint cannot be written, so it was not committed: {where}: {error}"
        ) from error
    try:
        read = Manifest.from_json(text, layout.MANIFEST)
    except CheckpointError as error:
        raise CheckpointError(
            f"This checkpoint would not be readable, so it was not committed: {error}"
        ) from error
    if read.to_json() != text:
        raise CheckpointError(
            "This checkpoint would not be read back as written, so it was not committed."
        )
    return text


class _ToldError(CheckpointError):
    """The failure of another worker, with what to do about it."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


def _remedy(error: Exception) -> str:
    """What to do about a save that failed; empty if the error says so itself."""
    if isinstance(error, _ToldError):
        return error.remedy
    if isinstance(error, OtherRunError):
        return "Give every training its own directory."
    if not isinstance(error, OSError):
        return ""
    number = error.errno
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "Free disk space, or raise the quota."
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Check the permissions of the directory."
    return "Fix the storage."


def _fingerprint(state: TrainState) -> str:
    variables = [str(spec) for spec in codec.specs_of(state.arrays)]
    return f"{len(variables)} variables, {digest_of({'variables': variables})[:16]}"


def _require_same(chiefs: str, others: str, rank: int) -> None:
    """The shares of workers that save different things would fit together to nothing."""
    if chiefs != others:
        raise CheckpointError(
            f"Worker {rank} saves other variables than worker 0 ({others}; {chiefs}). All workers "
            "need the same model, and the same callbacks of those that keep arrays."
        )


def _retried(action: Callable[[], T]) -> T:
    """What `action` gives, tried again for some seconds while the storage fails."""
    for attempt in stamina.retry_context(_may_pass, attempts=5, timeout=30.0):
        with attempt:
            return action()
    raise AssertionError("stamina raises the last error")


def _may_pass(error: Exception) -> bool:
    # A file that exists is ours, too: its name is this attempt's, and only an answer was lost.
    return isinstance(error, OSError) and not isinstance(error, PermissionError)


@functools.cache
def _versions() -> Mapping[str, str]:
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions
