"""The workers of a run write a checkpoint together.

Every worker writes its share of the bytes; in very large clusters, only some workers do. They
report their files to the first worker, which writes the manifest once all shares are written.
No collective is involved, so all of this can run in the background of training. A worker that
fails reports that, too; then no manifest is written.
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
from keras_distplug.storage.files import Files
from keras_distplug.storage.manifest import Manifest, Shard
from keras_distplug.storage.meter import Meter
from keras_distplug.storage.ownership import Ownership
from keras_distplug.storage.parallel import bounded_parallel_map
from keras_distplug.storage.sealed import compute_digest, find_unserializable
from keras_distplug.storage.store import CheckpointStore

_PACKAGES = (
    *("keras-distplug", "keras", "keras-nightly"),
    *("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu"),
)
_ALL_WRITE = 64  # up to this many workers all write a share, however small
_SHARE_BYTES = 4 * 2**20  # with more workers, the number of writers keeps shares at least this big
_FAILURES = (OSError, CheckpointError, AgreementError)
T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """The workers that write a checkpoint together.

    Args:
        rank: This worker's rank; 0 writes the manifest.
        size: The number of workers.
        exchange: The channel for messages between them.
        timeout_s: The timeout for another worker's share, in seconds. Defaults to 600.
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
        team: The workers that write.
        ownership: The ownership of the directory, on the worker that writes manifests. Defaults to
            `None`: no other process writes there.
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
        self._written: dict[int, tuple[str, Shard]] = {}  # by share: its last path and file
        self.meter = Meter()  # of this worker's share of the save under way

    @staticmethod
    def new_attempt() -> str:
        """Returns a new prefix for the attempts of one training job, unique to it."""
        return uuid.uuid4().hex

    def save(self, state: TrainState, attempt: str) -> None:
        """Writes a checkpoint, together with all other workers, then deletes outdated ones.

        Args:
            state: The state to save. Its arrays are the same on all workers; everything else is
                taken from the first worker.
            attempt: The same on all workers, and different for every save of the run.

        Raises:
            SaveError: If it could not be committed, or cannot be read back when it is about to
                replace old ones. Earlier checkpoints are untouched.
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
                f"{self._store.where()}: {str(error).rstrip('.')}. Earlier checkpoints are intact; "
                f"a restarted run resumes from the newest one. {_remedy(error)}".rstrip()
            ) from error

    def _lead(self, state: TrainState, attempt: str) -> None:
        kind: layout.Kind = "step" if state.completion is None else "final"
        name = self._send_result(
            f"{attempt}/folder", lambda: self._store.next_place(kind, state.cursor.step).name
        )
        self._send_result(f"{attempt}/end", lambda: self._commit(state, name, kind, attempt))
        try:
            if self._ownership is not None:
                self._ownership.require_recent()
            self._store.clear_other_attempts(name, attempt)
            self._store.clean(kind)
        except (CorruptCheckpointError, FencedError):
            raise
        except CheckpointError as error:
            warnings.warn(
                f"Old checkpoints in {self._store.where()} were not deleted: "
                f"{str(error).rstrip('.')}. Old checkpoints use disk space, but do no other harm.",
                stacklevel=2,
            )

    def _follow(self, state: TrainState, attempt: str) -> None:
        name = self._receive(f"{attempt}/folder")
        self._send_result(
            f"{attempt}/shards/{self._team.rank}",
            lambda: {
                "shards": [asdict(shard) for shard in self._write_share(state, name, attempt)],
                "variables": _fingerprint(state),
            },
        )
        self._receive(f"{attempt}/end")

    def _commit(self, state: TrainState, name: str, kind: layout.Kind, attempt: str) -> None:
        try:
            shards = self._all_shares(state, name, attempt)
            manifest = self._manifest(state, shards, attempt)
            self._publish_owned(
                self._store.path(name, layout.MANIFEST), _verified_text(manifest).encode()
            )
            self._store.record_committed(name, manifest)
        except FencedError:
            raise  # the files now belong to another process
        except Exception:
            self._free_space(kind)
            raise

    def _publish_owned(self, path: str, text: bytes) -> None:
        if self._ownership is None:
            self._publish(path, text)
            return
        self._ownership.require()
        self._publish(path, text)
        try:
            # This process may have been suspended between the check and the write.
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
                # It is ours if only the storage's answer was lost.
                if self._files.read(path) != text:
                    raise OtherRunError(
                        f"{self._files.where(path)} already exists, and was not written by this "
                        "run."
                    ) from None

        _retry(create)

    def _all_shares(self, state: TrainState, name: str, attempt: str) -> list[Shard]:
        shards, failures = [], []
        # Wait for all workers: a save's files must not be deleted while one still writes them.
        for rank in range(self._team.size):
            try:
                if rank == 0:
                    shards += self._write_share(state, name, attempt)
                else:
                    said = self._receive(f"{attempt}/shards/{rank}")
                    _require_same(_fingerprint(state), said["variables"], rank)
                    shards += [Shard(**each) for each in said["shards"]]
            except _FAILURES as error:
                failures.append(error)
        if self._team.size > 1:
            # Otherwise the exchange keeps the messages for as long as the job lives.
            self._team.exchange.forget(f"{attempt}/shards")
        if failures:
            raise failures[0]
        return shards

    def _write_share(self, state: TrainState, name: str, attempt: str) -> list[Shard]:
        variables = codec.make_specs(state.arrays)
        traits = self._files.traits
        writers = _writers(codec.count_bytes(variables), self._team.size)
        place = _writer_index(self._team.rank, writers, self._team.size)
        if place is None:
            self.meter.begin(0)
            return []
        files = codec.list_shard_files(variables, writers, traits.file_bytes)
        self.meter.begin(codec.count_bytes(variables) // writers)
        numbers = itertools.count(1)

        def new_file() -> str:
            # A new number for every try: the previous one may have written its file, and only the
            # storage's answer was lost.
            return layout.shard_file(attempt, self._team.rank, next(numbers))

        def write(share: int) -> Shard:
            pieces = codec.share(variables, share, count)
            # The final state usually equals that of the last step, which was just saved.
            if state.completion is not None and self._is_written(share, pieces, state):
                source, shard = self._written[share]
                file = new_file()
                with contextlib.suppress(OSError):  # then it is written again
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
        jobs = (functools.partial(_retry, functools.partial(write, share)) for share in mine)
        return list(bounded_parallel_map(jobs, traits.at_once))

    def _create(self, path: str, parts: codec.Hashed) -> None:
        if not self._files.traits.is_near:
            # Such a store consumes all parts before it sends the first: count them afterwards.
            self._files.create(path, parts)
            self.meter.add(parts.bytes)
            return
        try:
            self._files.create(path, _metered(parts, self.meter))
        except BaseException:
            self.meter.add(-parts.bytes)  # they are written again
            raise

    def _is_written(self, share: int, pieces: Sequence[codec.Piece], state: TrainState) -> bool:
        """True if an earlier save wrote the same bytes."""
        if share not in self._written:
            return False
        parts = codec.Hashed(codec.encode(pieces, state.arrays))
        deque(parts, maxlen=0)
        _, shard = self._written[share]
        return (parts.bytes, parts.xxh3_128) == (shard.bytes, shard.xxh3_128)

    def _manifest(self, state: TrainState, shards: list[Shard], attempt: str) -> Manifest:
        return Manifest(
            cursor=state.cursor,
            variables=codec.make_specs(state.arrays),
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

    def _free_space(self, kind: layout.Kind) -> None:
        try:
            if self._ownership is not None:
                self._ownership.require()
            # Also delete the leftovers of killed saves: they are normally cleaned up after a
            # successful save, but on a small disk they could make every save fail.
            self._store.clear_interrupted(kind)
        except FencedError:
            raise
        except CheckpointError as error:
            warnings.warn(f"The files of a failed save could not be deleted: {error}", stacklevel=2)

    def _send_result(self, topic: str, make: Callable[[], T]) -> T:
        """Sends the other workers the result of `make`, or its error."""
        try:
            value = make()
        except Exception as error:
            kind = "fenced" if isinstance(error, FencedError) else "failed"
            told = {kind: str(error), "remedy": _remedy(error)}
            self._team.exchange.send(topic, json.dumps(told))
            raise
        self._team.exchange.send(topic, json.dumps({"value": value}))
        return value

    def _receive(self, topic: str) -> Any:
        said = json.loads(self._team.exchange.receive(topic, self._team.timeout_s))
        if "fenced" in said:
            raise FencedError(said["fenced"])
        if "failed" in said:
            raise _ReportedError(said["failed"], said["remedy"])
        return said["value"]


def _writers(size: int, workers: int) -> int:
    """Returns how many of `workers` write a state of `size` bytes. Every worker that restores it
    reads every file, so the number of files must not grow with the number of workers."""
    return min(workers, max(_ALL_WRITE, size // _SHARE_BYTES))


def _writer_index(rank: int, writers: int, workers: int) -> int | None:
    """Returns this worker's index among the writers, or None if it does not write. Writers are
    spread evenly over the workers, and so over the machines."""
    place = -(-rank * writers // workers)
    return place if place < writers and place * workers // writers == rank else None


def _metered(parts: codec.Hashed, meter: Meter) -> Iterator[memoryview]:
    for part in parts:
        meter.add(part.nbytes)
        yield part


def _verified_text(manifest: Manifest) -> str:
    """Returns the manifest's text, once it is certain that it can be read back."""
    try:
        text = manifest.to_json()
    except (TypeError, ValueError, RecursionError) as error:
        where = find_unserializable(vars(manifest)) or "its state"
        raise CheckpointError(f"{where} cannot be stored as JSON: {error}") from error
    try:
        read = Manifest.from_json(text, layout.MANIFEST)
    except CheckpointError as error:
        raise CheckpointError(f"its manifest could not be read back: {error}") from error
    if read.to_json() != text:
        raise CheckpointError("JSON would change some of its values")
    return text


class _ReportedError(CheckpointError):
    """The failure of another worker, with its remedy."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


def _remedy(error: Exception) -> str:
    """Returns the remedy for a failed save; empty if the error message already contains it."""
    if isinstance(error, _ReportedError):
        return error.remedy
    if isinstance(error, OtherRunError):
        return "Give every training job its own directory."
    if not isinstance(error, OSError):
        return ""
    number = error.errno
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "Free disk space, or raise the quota."
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Check the permissions of the directory."
    return "Fix the storage."


def _fingerprint(state: TrainState) -> str:
    variables = [str(spec) for spec in codec.make_specs(state.arrays)]
    return f"{len(variables)} variables, hash {compute_digest({'variables': variables})[:16]}"


def _require_same(chiefs: str, others: str, rank: int) -> None:
    """Raises if two workers save different variables, whose shares would not fit together."""
    if chiefs != others:
        raise CheckpointError(
            f"Expected all workers to save the same variables. Received: {chiefs}, on worker 0; "
            f"{others}, on worker {rank}. Use the same model on all workers, and the same "
            "callbacks, at least those that store arrays."
        )


def _retry(action: Callable[[], T]) -> T:
    """Returns the result of `action`, retrying for up to 30 seconds while the storage fails."""
    for attempt in stamina.retry_context(_is_transient, attempts=5, timeout=30.0):
        with attempt:
            return action()
    raise AssertionError("stamina raises the last error")


def _is_transient(error: Exception) -> bool:
    # An existing file is retried, too: names are unique to an attempt, so it is ours, and only the
    # storage's answer was lost.
    return isinstance(error, OSError) and not isinstance(error, PermissionError)


@functools.cache
@functools.cache
def _versions() -> Mapping[str, str]:
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions
