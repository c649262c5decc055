"""The checkpoints of a run: reading, verifying, cleaning. `layout.py` says where they stand."""

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
from keras_distplug.storage.retention import Kept, Retention

_READERS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class Stored:
    """A checkpoint.

    Args:
        name: The name of its folder.
        manifest: All but the values.
        values: Reads key and value of one variable after the other, into the memory that an
            `Allocate` makes, by default NumPy's, and counts what was read with a `Meter`, if it is
            given one. What came out counts once it has ended, for it verifies while it reads, and
            raises as `CheckpointStore.verify` does.
        require_files: Raises so, without reading them, unless the files have the sizes that the
            manifest gives, and room for its variables.
    """

    name: str
    manifest: Manifest
    values: Callable[..., Iterator[tuple[str, Any]]]
    require_files: Callable[[], None]

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """All values at once, by key, in the model's order."""
        found = dict(self.values())
        return {variable.key: found[variable.key] for variable in self.manifest.variables}


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        files: The folder that holds the run's folder.
        run_name: The name of the run's folder.
        retention: Which checkpoints of each kind stay. Defaults to the two newest.
    """

    def __init__(self, files: Files, run_name: str, retention: Retention | None = None) -> None:
        self._files = files
        self._run = run_name
        self._retention = retention or Retention()
        self._metrics: dict[str, Mapping[str, float]] = {}  # of manifests that were read
        self._aside: set[str] = set()
        self._inventory = Inventory(files, run_name)
        self._reused: set[str] = set()  # folders in which earlier attempts may have left something

    # Reading

    def newest(self, kind: Kind) -> Stored | None:
        """The newest checkpoint of `kind` that is not set aside; None if there never was one.

        One whose manifest does not verify is set aside. The values are verified as they are read:
        who finds them damaged calls `set_aside` and asks once more.

        Args:
            kind: Of a run under way, or of its end.

        Raises:
            CorruptCheckpointError: If there are checkpoints of `kind` and all are damaged.
            CheckpointError: If one cannot be read; that may pass, so it is not set aside.
        """
        damaged = []
        for name in reversed(self._names(kind)):
            if name in self._aside or self.has(name, layout.DAMAGED):
                self._warn_of_link(name)
                damaged.append(name)
                continue
            if not self.has(name, layout.MANIFEST):
                continue
            try:
                return self.read(name)
            except CorruptCheckpointError as error:
                self.set_aside(name, error)
                damaged.append(name)
        if damaged:
            raise CorruptCheckpointError(
                f"All {kind} checkpoints in {self.where()} are damaged: {', '.join(damaged)}. "
                f"{layout.DAMAGED} in each says how. Give resume=False to start a new run beside "
                f"them, or put one back from a copy and delete its {layout.DAMAGED}."
            )
        return None

    def _warn_of_link(self, name: str) -> None:
        try:
            layout.names(self._files, self.path(name))
        except CheckpointError as error:
            warnings.warn(f"A checkpoint is ignored. {error}", stacklevel=4)

    def read(self, name: str) -> Stored:
        """The checkpoint in the folder `name`, whose values are verified as they are read.

        Raises:
            CorruptCheckpointError: If its manifest is not the one that was committed.
            CheckpointError: If that cannot be read.
        """
        manifest = self._manifest(name)
        return Stored(
            name,
            manifest,
            values=functools.partial(self._values, name, manifest),
            require_files=functools.partial(self._require_files, name, manifest),
        )

    def verify(self, name: str, deep: bool = True) -> None:
        """Reads the checkpoint in the folder `name`, and nothing more.

        It starts no thread: a process that waits for a save at its end cannot.

        Args:
            name: The folder.
            deep: `False` looks at the sizes of its files only.

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

    def set_aside(self, name: str, error: CorruptCheckpointError) -> None:
        """Leaves the checkpoint in the folder `name` as it is, marks it and warns of it."""
        self._aside.add(name)
        self._inventory.note_damaged(name)
        report(Quarantined(self.where(name), str(error)))
        warnings.warn(f"The checkpoint {self.where(name)} is set aside: {error}", stacklevel=3)
        note = {"reason": str(error), "found_utc": layout.now()}
        path = self.path(name, layout.DAMAGED)
        try:
            self._files.create(path, [json.dumps(note, indent=1).encode()])
        except FileExistsError:
            pass  # another process found the same
        except OSError as failure:
            warnings.warn(
                f"{self.where(name, layout.DAMAGED)} could not be written: {failure}", stacklevel=3
            )

    def committed(self, kind: Kind) -> list[str]:
        """Names of the checkpoints of `kind` that are not set aside, the oldest first."""
        names = [name for name in self._names(kind) if not self.has(name, layout.DAMAGED)]
        return [name for name in names if self.has(name, layout.MANIFEST)]

    def has(self, name: str, file: str) -> bool:
        return file in layout.inside(self._files, self.path(name))

    # Deleting

    def note_committed(self, name: str, manifest: Manifest) -> None:
        """Notes a checkpoint that this process has just committed, so that `clean` need not look at
        it."""
        inside = None if name in self._reused else {manifest.nonce, layout.MANIFEST}
        self._inventory.note_committed(name, inside)
        self._metrics[name] = manifest.metrics

    def clean(self, kind: Kind) -> None:
        """Deletes checkpoints of `kind` that need not stay, and what cut-off saves have left.

        Nothing is deleted before those that stay have been looked at: whether each is there and not
        marked as damaged (on SFTP servers, only the two newest), whether the newest can be read,
        and, if `keep_last` is more than 1, once per process whether the one before it can. From a
        distant store only their manifests are read back for that, and the sizes of their files.
        Further ones that stay are not verified, so that a save costs the same however many there
        are. If one is damaged or gone, an older one stays instead.

        Raises:
            CorruptCheckpointError: If the newest is damaged; it is set aside, and nothing is
                deleted.
            CheckpointError: If something cannot be read or deleted.
        """
        places = [place for place in self._inventory.current() if place.kind == kind]
        verified, is_afresh = None, False
        while True:
            inside = self._inventory.inside(place.name for place in places)
            whole = [place for place in places if is_whole(inside[place.name])]
            old = self._old(whole)
            if old is None:
                continue
            cut_off = [
                place.name
                for place in places
                if whole and place < whole[-1] and not self._inventory.remembers(place.name)
            ]
            if not old and not cut_off:
                return
            if not is_afresh:
                self._inventory.forget_all()
                is_afresh = True
                continue
            newest, guard = whole[-1].name, whole[-self._retention.keep_last :][-2:][0].name
            if newest != verified:
                self._verify_newest(newest)
                verified = newest
            if self._still_stands(guard):
                break
            places = [place for place in places if place.name != guard]
        for name in (*old, *cut_off):
            self._delete_outdated(name, is_cut_off=name in cut_off)

    def _old(self, whole: Sequence[Place]) -> Sequence[str] | None:
        """Returns the names of those that may go; None if one was found damaged, so that this must
        be asked again."""
        kept = []
        for place in whole:
            try:
                kept.append(self._kept(place))
            except CorruptCheckpointError as error:
                self.set_aside(place.name, error)
                return None
        return self._retention.expired(kept)

    def _verify_newest(self, name: str) -> None:
        try:
            self.verify(name, deep=self._files.traits.is_near)
        except CorruptCheckpointError as error:
            self.set_aside(name, error)
            raise

    def _still_stands(self, name: str) -> bool:
        """Whether a checkpoint that stays is intact, as far as `clean` says; a damaged one is set
        aside. Its folder is looked at each time: another process may have marked or deleted it."""
        if not is_whole(self._inventory.look_again(name)):
            return False
        try:
            if (shards := self._inventory.verified.get(name)) is None:
                self.verify(name, deep=self._files.traits.is_near)
            elif self._files.traits.is_near or is_object_store(self._files):
                self._require_known_sizes(name, shards)
        except CorruptCheckpointError as error:
            self.set_aside(name, error)
            return False
        return True

    def _delete_outdated(self, name: str, *, is_cut_off: bool) -> None:
        """Deletes a checkpoint, or what is left of one, unless it is not what it was taken for."""
        inside = self._inventory.look_again(name)
        if layout.DAMAGED in inside or (is_cut_off and layout.MANIFEST in inside):
            return
        if layout.MANIFEST in inside:
            # Without its manifest the rest does not count, should this be cut off.
            self.delete(name, layout.MANIFEST)
        self.delete(name)

    def clear_other_attempts(self, name: str, attempt: str) -> None:
        """Deletes what other attempts to write the committed checkpoint `name` have left."""
        if name in self._reused:
            self._reused.discard(name)
            self._clear_but(name, attempt, layout.names(self._files, self.path(name)))

    def _clear_but(self, name: str, attempt: str, inside: Iterable[str]) -> None:
        for file in inside:
            if file not in (attempt, layout.MANIFEST, layout.DAMAGED):
                self.delete(name, file)

    def clear_cut_off(self, kind: Kind) -> None:
        """Deletes what saves of `kind` have left that did not come to their end, be it of writing
        or of cleaning.

        Raises:
            CheckpointError: As `clean` does.
        """
        names = [place.name for place in self._inventory.refresh() if place.kind == kind]
        self._inventory.distrust()
        is_committed = False
        for name, inside in self._inventory.inside(names).items():
            if layout.DAMAGED in inside:
                continue
            # A manifest that is there all the same may be that of the save that is thought to have
            # failed.
            if layout.MANIFEST in inside:
                if len(inside) > 2:
                    self._clear_but(name, self._manifest(name).nonce, inside)
                is_committed = True
            else:
                self._delete_outdated(name, is_cut_off=True)
                self._reused.add(name)  # a request that was given up may still arrive
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
                f"{self._files.where(path)} could not be deleted: {error}. Delete it by hand."
            ) from error

    def delete_run(self) -> None:
        """Deletes the run with its checkpoints."""
        # Without its record the rest does not count, should this be cut off.
        self.delete(layout.RECORD)
        self.delete("")

    # Names

    def new_place(self, kind: Kind, step: int) -> Place:
        """Where a checkpoint that is newer than all of its step goes."""
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
        """How to name it to a person."""
        return self._files.where(self.path(name, file))

    def _places(self, kind: Kind) -> list[Place]:
        return [place for place in layout.places(self._files, self._run) if place.kind == kind]

    def _names(self, kind: Kind) -> list[str]:
        return [place.name for place in self._places(kind)]

    # How

    def _kept(self, place: Place) -> Kept:
        if self._retention.keep_best is None:
            return Kept(place.name, place.step)
        if place.name not in self._metrics:
            self._manifest(place.name)
        return Kept(place.name, place.step, self._metrics[place.name])

    def _manifest(self, name: str) -> Manifest:
        with self._reading(name, layout.MANIFEST):
            text = self._files.read(self.path(name, layout.MANIFEST))
        try:
            manifest = Manifest.from_json(text.decode(), self.where(name, layout.MANIFEST))
        except UnicodeDecodeError as error:
            raise CorruptCheckpointError(
                f"{self.where(name, layout.MANIFEST)} is no text: {error}"
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
        # One after the other, so that the memory of a value that is no longer needed serves for the
        # next: that is faster than new memory, and one copy of a model's state is enough.
        room = codec.Room(manifest.variables, allocate, self.where(name))
        # Memory is made by what the manifest says, so it has to be true before.
        self._require_files(name, manifest)
        meter = meter or Meter()
        meter.begin(sum(shard.bytes for shard in manifest.shards))
        for shard in manifest.shards:
            read_into = functools.partial(self._read_into, name, shard.file)
            where = self.where(name, shard.file)
            read = codec.read(read_into, shard.bytes, room, where, _READERS)
            for part in self._checked(name, shard, read):
                meter.add(part.nbytes)
                yield from room.take()
            yield from room.take()
        room.require_all_taken()

    def _checked(self, name: str, shard: Shard, read: Iterable[memoryview]) -> Iterator[memoryview]:
        """What is read of a shard, and at its end an error if it is not what was committed."""
        parts = codec.Hashed(read)
        yield from parts
        self._require_size(name, shard, parts.bytes)
        if parts.xxh3_128 != shard.xxh3_128:
            raise CorruptCheckpointError(
                f"{self.where(name, shard.file)} has changed since it was written: XXH3 is "
                f"{parts.xxh3_128}, {shard.xxh3_128} was committed."
            )

    def _require_files(self, name: str, manifest: Manifest) -> None:
        self._require_sizes(name, manifest.shards)
        wanted = codec.bytes_of(manifest.variables)
        there = sum(shard.bytes for shard in manifest.shards)
        if wanted > there:
            raise CorruptCheckpointError(
                f"{self.where(name)} is said to hold variables of {wanted} bytes, in files of "
                f"{there} bytes."
            )

    def _require_sizes(self, name: str, shards: Iterable[Shard]) -> None:
        shards = list(shards)
        if len(shards) > 1 and not self._files.traits.is_near:
            # One listing tells the sizes of a thousand files, which are not asked for one by one
            # then.
            for folder in sorted({shard.file.rpartition("/")[0] for shard in shards}):
                layout.names(self._files, self.path(name, folder))
        self._require_known_sizes(name, shards)

    def _require_known_sizes(self, name: str, shards: Iterable[Shard]) -> None:
        """As `_require_sizes`, without a request for those that a store has listed."""
        for shard in shards:
            with self._reading(name, shard.file):
                size = self._files.size(self.path(name, shard.file))
            self._require_size(name, shard, size)

    def _require_size(self, name: str, shard: Shard, found: int) -> None:
        if found != shard.bytes:
            raise CorruptCheckpointError(
                f"{self.where(name, shard.file)} has "
                f"{'more' if found > shard.bytes else found} bytes; {shard.bytes} were committed."
            )

    def _parts(self, name: str, shard: Shard) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(codec.PART_BYTES))
        # To its end, and so much as a byte beyond.
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
