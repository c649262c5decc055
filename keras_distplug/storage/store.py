"""The checkpoints of a run: reading, verifying and cleaning up. See `layout.py` for their paths."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_distplug.core.errors import CheckpointError, CorruptCheckpointError
from keras_distplug.core.events import Quarantined
from keras_distplug.core.reporting import report
from keras_distplug.storage import codec, layout
from keras_distplug.storage.files import Files, NoFileError, is_object_store, remedy
from keras_distplug.storage.inventory import Inventory, is_whole
from keras_distplug.storage.layout import Kind, Place
from keras_distplug.storage.manifest import Manifest, Shard
from keras_distplug.storage.memory import Allocate
from keras_distplug.storage.meter import Meter
from keras_distplug.storage.retention import Retention, RetentionEntry

_READERS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class Stored:
    """A checkpoint.

    Args:
        name: The name of its folder.
        manifest: Everything except the values of variables.
        values: Yields the key and value of one variable at a time, read into memory from an
            optional `Allocate` (NumPy's by default), and counts the bytes read in an optional
            `Meter`. It verifies while it reads, raising the errors of `CheckpointStore.verify`: its
            values must not be used until it has finished.
        require_files: Raises the same errors, without reading the files, unless they have the sizes
            in the manifest and can hold its variables.
    """

    name: str
    manifest: Manifest
    values: Callable[..., Iterator[tuple[str, Any]]]
    require_files: Callable[[], None]

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """All values by key, in the model's order."""
        found = dict(self.values())
        return {variable.key: found[variable.key] for variable in self.manifest.variables}


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        files: The folder that holds the run's folder.
        run_name: The name of the run's folder.
        retention: The checkpoints of every kind to keep. Defaults to the two newest.
    """

    def __init__(self, files: Files, run_name: str, retention: Retention | None = None) -> None:
        self._files = files
        self._run = run_name
        self._retention = retention or Retention()
        self._metrics: dict[str, Mapping[str, float]] = {}  # of manifests that were read
        self._quarantined: set[str] = set()
        self._inventory = Inventory(files, run_name)
        self._reused: set[str] = set()  # folders in which earlier attempts may have left something

    # Reading

    def newest(self, kind: Kind) -> Stored | None:
        """Returns the newest checkpoint of `kind` that is not quarantined; None if there never was
        one.

        A checkpoint whose manifest fails verification is quarantined. Values are verified only as
        they are read: a caller that finds them damaged calls `quarantine`, then this again.

        Args:
            kind: `"step"` for a run in progress, `"final"` for one that has finished.

        Raises:
            CorruptCheckpointError: If there are checkpoints of `kind`, but all are damaged.
            CheckpointError: If one cannot be read. It is not quarantined, since the failure may be
                temporary.
        """
        damaged = []
        for name in reversed(self._names(kind)):
            if name in self._quarantined or self.has(name, layout.DAMAGED):
                self._warn_of_link(name)
                damaged.append(name)
                continue
            if not self.has(name, layout.MANIFEST):
                continue
            try:
                return self.read(name)
            except CorruptCheckpointError as error:
                self.quarantine(name, error)
                damaged.append(name)
        if damaged:
            raise CorruptCheckpointError(
                f"All checkpoints in {self.where()} whose names start with {kind}- are damaged: "
                f"{', '.join(damaged)}. {layout.DAMAGED} in each folder, if present, gives the "
                "reason. Pass resume=False to start a new run alongside them, or restore one from "
                f"a backup and delete its {layout.DAMAGED}."
            )
        return None

    def _warn_of_link(self, name: str) -> None:
        try:
            layout.names(self._files, self.path(name))
        except CheckpointError as error:
            warnings.warn(f"A checkpoint is ignored. {error}", stacklevel=4)

    def read(self, name: str) -> Stored:
        """Returns the checkpoint in the folder `name`, whose values are verified as they are read.

        Raises:
            CorruptCheckpointError: If its manifest is not the one that was committed.
            CheckpointError: If the manifest cannot be read.
        """
        manifest = self._manifest(name)
        return Stored(
            name,
            manifest,
            values=functools.partial(self._values, name, manifest),
            require_files=functools.partial(self._require_files, name, manifest),
        )

    def verify(self, name: str, deep: bool = True) -> None:
        """Verifies the checkpoint in the folder `name` by reading it.

        This starts no thread: a process that waits for a save at exit cannot start one.

        Args:
            name: The name of the folder.
            deep: If `False`, only the sizes of its files are checked. Defaults to `True`.

        Raises:
            CorruptCheckpointError: If its bytes are not those that were committed.
            CheckpointError: If it cannot be read.
        """
        shards = self._manifest(name).shards
        self._require_sizes(name, shards)
        if deep:
            for shard in shards:
                for _ in self._checked(name, shard, self._parts(name, shard)):
                    pass
        if deep or not self._files.traits.is_near:
            self._inventory.verified[name] = shards

    def quarantine(self, name: str, error: CorruptCheckpointError) -> None:
        """Quarantines the checkpoint in the folder `name`: marks it and warns, without changing its
        files."""
        self._quarantined.add(name)
        self._inventory.record_damaged(name)
        report(Quarantined(self.where(name), str(error)))
        warnings.warn(
            f"The checkpoint {self.where(name)} is quarantined: it is damaged and will not be "
            f"restored. Cause: {error}",
            stacklevel=3,
        )
        note = {"reason": str(error), "found_utc": layout.now()}
        path = self.path(name, layout.DAMAGED)
        try:
            self._files.create(path, [json.dumps(note, indent=1).encode()])
        except FileExistsError:
            pass  # another process found the same damage
        except OSError as failure:
            warnings.warn(
                f"{self.where(name, layout.DAMAGED)} could not be written: {failure}. A restarted "
                "run will check this checkpoint again.",
                stacklevel=3,
            )

    def committed(self, kind: Kind) -> list[str]:
        """Returns the names of the checkpoints of `kind` that are not quarantined, oldest first."""
        names = [name for name in self._names(kind) if not self.has(name, layout.DAMAGED)]
        return [name for name in names if self.has(name, layout.MANIFEST)]

    def has(self, name: str, file: str) -> bool:
        return file in layout.inside(self._files, self.path(name))

    # Deleting

    def record_committed(self, name: str, manifest: Manifest) -> None:
        """Records a checkpoint that this process has just committed, so that `clean` need not list
        it."""
        inside = None if name in self._reused else {manifest.nonce, layout.MANIFEST}
        self._inventory.record_committed(name, inside)
        self._metrics[name] = manifest.metrics

    def clean(self, kind: Kind) -> None:
        """Deletes outdated checkpoints of `kind` and the leftovers of interrupted saves.

        Nothing is deleted before the checkpoints to keep have been checked: all of them must exist
        and not be marked as damaged (on SFTP servers, this is checked of the two newest only), and
        the newest must be readable. If `keep_last` is more than 1, the second newest is verified,
        too, once per process. In remote stores, only manifests and the sizes of files are read for
        this. Other checkpoints are not verified, so that the cost of a save does not grow with
        their number. If one is damaged or missing, an older one is kept instead.

        Raises:
            CorruptCheckpointError: If the newest is damaged; it is quarantined, and nothing is
                deleted.
            CheckpointError: If something cannot be read or deleted.
        """
        places = [place for place in self._inventory.current() if place.kind == kind]
        verified, is_relisted = None, False
        while True:
            inside = self._inventory.inside(place.name for place in places)
            whole = [place for place in places if is_whole(inside[place.name])]
            old = self._outdated(whole)
            if old is None:
                continue
            cut_off = [
                place.name
                for place in places
                if whole and place < whole[-1] and not self._inventory.is_cached(place.name)
            ]
            if not old and not cut_off:
                return
            if not is_relisted:
                self._inventory.forget_all()
                is_relisted = True
                continue
            newest, guard = whole[-1].name, whole[-self._retention.keep_last :][-2:][0].name
            if newest != verified:
                self._verify_newest(newest)
                verified = newest
            if self._is_still_intact(guard):
                break
            places = [place for place in places if place.name != guard]
        for name in (*old, *cut_off):
            self._delete_outdated(name, is_interrupted=name in cut_off)

    def _outdated(self, whole: Sequence[Place]) -> Sequence[str] | None:
        """Returns the names of the checkpoints that may be deleted; None if one was found damaged,
        so that the caller must start over."""
        kept = []
        for place in whole:
            try:
                kept.append(self._retention_entry(place))
            except CorruptCheckpointError as error:
                self.quarantine(place.name, error)
                return None
        return self._retention.expired(kept)

    def _verify_newest(self, name: str) -> None:
        try:
            self.verify(name, deep=self._files.traits.is_near)
        except CorruptCheckpointError as error:
            self.quarantine(name, error)
            raise

    def _is_still_intact(self, name: str) -> bool:
        """True if a checkpoint to keep is intact by the checks of `clean`; quarantines a damaged
        one. Its folder is listed every time: another process may have marked or deleted it."""
        if not is_whole(self._inventory.refresh_folder(name)):
            return False
        try:
            if (shards := self._inventory.verified.get(name)) is None:
                self.verify(name, deep=self._files.traits.is_near)
            elif self._files.traits.is_near or is_object_store(self._files):
                self._require_known_sizes(name, shards)
        except CorruptCheckpointError as error:
            self.quarantine(name, error)
            return False
        return True

    def _delete_outdated(self, name: str, *, is_interrupted: bool) -> None:
        """Deletes a checkpoint or the leftovers of one, unless its folder has changed since."""
        inside = self._inventory.refresh_folder(name)
        if layout.DAMAGED in inside or (is_interrupted and layout.MANIFEST in inside):
            return
        if layout.MANIFEST in inside:
            # Delete the manifest first: if this is interrupted, the rest counts as no checkpoint.
            self.delete(name, layout.MANIFEST)
        self.delete(name)

    def clear_other_attempts(self, name: str, attempt: str) -> None:
        """Deletes leftovers of other attempts to write the committed checkpoint `name`."""
        if name in self._reused:
            self._reused.discard(name)
            self._clear_except(name, attempt, layout.names(self._files, self.path(name)))

    def _clear_except(self, name: str, attempt: str, inside: Iterable[str]) -> None:
        for file in inside:
            if file not in (attempt, layout.MANIFEST, layout.DAMAGED):
                self.delete(name, file)

    def clear_interrupted(self, kind: Kind) -> None:
        """Deletes the leftovers of saves of `kind` that were interrupted, whether while writing or
        while cleaning up.

        Raises:
            CheckpointError: If something cannot be read or deleted, as in `clean`.
        """
        names = [place.name for place in self._inventory.refresh() if place.kind == kind]
        self._inventory.distrust()
        is_committed = False
        for name, inside in self._inventory.inside(names).items():
            if layout.DAMAGED in inside:
                continue
            # The save that is thought to have failed may have written its manifest nevertheless.
            if layout.MANIFEST in inside:
                if len(inside) > 2:
                    self._clear_except(name, self._manifest(name).nonce, inside)
                is_committed = True
            else:
                self._delete_outdated(name, is_interrupted=True)
                self._reused.add(name)  # an abandoned request may still arrive
        if is_committed:
            self.clean(kind)

    def delete(self, name: str, file: str = "") -> None:
        path = self.path(name, file)
        if not file:
            self._inventory.forget(name)
        try:
            if file == layout.MANIFEST and is_object_store(self._files):
                self._files.delete_file(path)
            else:
                self._files.delete(path)
        except OSError as error:
            raise CheckpointError(
                f"{self._files.where(path)} could not be deleted: {error}. Check the storage "
                "and its permissions."
            ) from error

    def delete_run(self) -> None:
        """Deletes the run with its checkpoints."""
        # Delete the record first: if this is interrupted, the rest counts as no run.
        self.delete(layout.RECORD)
        self.delete("")

    # Names

    def next_place(self, kind: Kind, step: int) -> Place:
        """Returns the place for a new checkpoint of a step, newer than all existing ones of it."""
        places = self._inventory.refresh()
        same = [place for place in places if (place.kind, place.step) == (kind, step)]
        if not same:
            return Place(step, 1, kind)
        last = same[-1]
        if self._inventory.inside([last.name])[last.name] & {layout.MANIFEST, layout.DAMAGED}:
            return Place(step, last.number + 1, kind)
        self._reused.add(last.name)
        return last

    def path(self, name: str, file: str = "") -> str:
        return "/".join(filter(None, (self._run, name, file)))

    def where(self, name: str = "", file: str = "") -> str:
        """Returns the name of a checkpoint or file for messages."""
        return self._files.where(self.path(name, file))

    def _places(self, kind: Kind) -> list[Place]:
        return [place for place in layout.places(self._files, self._run) if place.kind == kind]

    def _names(self, kind: Kind) -> list[str]:
        return [place.name for place in self._places(kind)]

    # Internals

    def _retention_entry(self, place: Place) -> RetentionEntry:
        if self._retention.keep_best is None:
            return RetentionEntry(place.name, place.step)
        if place.name not in self._metrics:
            self._manifest(place.name)
        return RetentionEntry(place.name, place.step, self._metrics[place.name])

    def _manifest(self, name: str) -> Manifest:
        with self._reading(name, layout.MANIFEST):
            text = self._files.read(self.path(name, layout.MANIFEST))
        try:
            manifest = Manifest.from_json(text.decode(), self.where(name, layout.MANIFEST))
        except UnicodeDecodeError as error:
            raise CorruptCheckpointError(
                f"{self.where(name, layout.MANIFEST)} is not a text file: {error}."
            ) from error
        self._metrics[name] = manifest.metrics
        return manifest

    def _values(
        self,
        name: str,
        manifest: Manifest,
        allocate: Allocate | None = None,
        meter: Meter | None = None,
    ) -> Iterator[tuple[str, Any]]:
        # One variable at a time, so that the memory of a value that was already used is recycled:
        # that is faster than new memory, and one copy of a model's state is enough.
        buffers = codec.Buffers(manifest.variables, allocate, self.where(name))
        # Memory is allocated by the manifest, so check the manifest against the files first.
        self._require_files(name, manifest)
        meter = meter or Meter()
        meter.begin(sum(shard.bytes for shard in manifest.shards))
        for shard in manifest.shards:
            read_into = functools.partial(self._read_into, name, shard.file)
            where = self.where(name, shard.file)
            read = codec.read(read_into, shard.bytes, buffers, where, _READERS)
            for part in self._checked(name, shard, read):
                meter.add(part.nbytes)
                yield from buffers.take()
            yield from buffers.take()
        buffers.require_all_taken()

    def _checked(self, name: str, shard: Shard, read: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yields the parts read from a shard, then raises if it differs from the committed one."""
        parts = codec.Hashed(read)
        yield from parts
        self._require_size(name, shard, parts.bytes)
        if parts.xxh3_128 != shard.xxh3_128:
            raise CorruptCheckpointError(
                f"{self.where(name, shard.file)} has changed since it was written: expected XXH3 "
                f"{shard.xxh3_128}, received {parts.xxh3_128}."
            )

    def _require_files(self, name: str, manifest: Manifest) -> None:
        self._require_sizes(name, manifest.shards)
        wanted = codec.count_bytes(manifest.variables)
        there = sum(shard.bytes for shard in manifest.shards)
        if wanted > there:
            raise CorruptCheckpointError(
                f"The manifest of {self.where(name)} declares {wanted} bytes of variables, but its "
                f"files contain only {there} bytes."
            )

    def _require_sizes(self, name: str, shards: Iterable[Shard]) -> None:
        shards = list(shards)
        if len(shards) > 1 and not self._files.traits.is_near:
            # One listing returns the sizes of up to a thousand files, which then need no requests.
            for folder in sorted({shard.file.rpartition("/")[0] for shard in shards}):
                layout.names(self._files, self.path(name, folder))
        self._require_known_sizes(name, shards)

    def _require_known_sizes(self, name: str, shards: Iterable[Shard]) -> None:
        """Checks sizes as `_require_sizes` does, without listing: known sizes need no request."""
        for shard in shards:
            with self._reading(name, shard.file):
                size = self._files.size(self.path(name, shard.file))
            self._require_size(name, shard, size)

    def _require_size(self, name: str, shard: Shard, found: int) -> None:
        if found != shard.bytes:
            where = self.where(name, shard.file)
            raise CorruptCheckpointError(
                f"{where} has more bytes than the {shard.bytes} that were committed."
                if found > shard.bytes
                else f"{where} has only {found} of the {shard.bytes} bytes that were committed."
            )

    def _parts(self, name: str, shard: Shard) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(codec.PART_BYTES))
        # Read to the end and one byte beyond, to detect a file that is too long.
        for offset in range(0, shard.bytes + 1, len(buffer)):
            yield buffer[: self._read_into(name, shard.file, offset, buffer)]

    def _read_into(self, name: str, file: str, offset: int, buffer: memoryview) -> int:
        with self._reading(name, file):
            return self._files.read_into(self.path(name, file), offset, buffer)

    @contextlib.contextmanager
    def _reading(self, name: str, file: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise CorruptCheckpointError(f"{self.where(name, file)} is missing.") from error
        except NoFileError as error:
            raise CorruptCheckpointError(
                f"{self.where(name, file)} cannot be read: {error}. {remedy(error)}"
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"{self.where(name, file)} cannot be read: {error}. {remedy(error)}"
            ) from error
