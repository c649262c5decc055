"""Files under one folder, created once and never changed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.threads import in_daemon

_BUFFER_BYTES = 2**18  # for small parts; larger ones pass it by
_FLUSH_BYTES = 16 * 2**20
_FLUSH_THREAD = "keras_distplug-flush"
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True)
class Traits:
    """How the files of a store are best used.

    Args:
        file_bytes: How much at most goes into one file: so much is written again when a write
            fails.
        at_once: How many files are best written at once.
        is_near: Whether reading back all that was written is cheap.
    """

    file_bytes: int
    at_once: int
    is_near: bool


class Files(Protocol):
    """A folder. Paths are relative to it, with `/`."""

    @property
    def traits(self) -> Traits: ...

    def create(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        """Makes a file that holds `parts` once this returns, whatever happens then.

        Raises:
            FileExistsError: If it exists; it is untouched.
            OSError: If that fails; no file of this name exists then.
        """
        ...

    def copy(self, source: str, path: str) -> None:
        """Makes a file that holds what the file `source` does, without writing that again.

        Raises:
            FileExistsError: If it exists; it is untouched.
            OSError: If that fails, or the storage has nothing of the kind.
        """
        ...

    def read(self, path: str) -> bytes: ...

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        """Fills `buffer` with the file from `offset` on.

        Returns:
            The number of bytes read; less than `buffer` has if the file ends there.
        """
        ...

    def size(self, path: str) -> int:
        """The bytes of a file."""
        ...

    def names(self, folder: str = "") -> list[str]:
        """What stands in `folder`, sorted; empty if there is no such folder."""
        ...

    def delete(self, path: str) -> None:
        """Deletes a file, or a folder with all it holds. Does nothing if there is none."""
        ...

    def delete_if_empty(self) -> None:
        """Deletes the folder itself, if it holds nothing and the storage has folders."""
        ...

    def where(self, path: str = "") -> str:
        """How to name `path` to a person."""
        ...


def open_files(
    url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Files:
    """The folder that `url` names. It need not exist.

    Args:
        url: A path, or a URL: `file://`, `memory://`, `s3://`, `gs://`, `az://`, `sftp://`.
        storage_options: What the store's fsspec file system takes, such as `endpoint_url`.

    Raises:
        ConfigurationError: If it names no folder, or what its store needs is not installed.
    """
    text = os.fspath(url)
    root = local_path(text)
    if root is None:
        # Loads fsspec, which a local folder does not need.
        from keras_distplug.storage.remote import open_remote

        return open_remote(text, storage_options or {})
    if storage_options:
        raise ConfigurationError(
            f"`storage_options` is for URLs of a store. Received: {text!r}, a folder."
        )
    first = next((path for path in (root, *root.parents) if os.path.lexists(path)), root)
    if not first.is_dir():
        raise ConfigurationError(
            f"Expected a folder. Received: {os.fspath(url)!r}, where {first} is a "
            "file, or a link to nothing. Give another folder."
        )
    return LocalFiles(root)


def local_path(url: str) -> Path | None:
    """The path that `url` names; None if it names a place in a store."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme not in ("file", "local"):
        return None
    return Path(os.path.abspath(os.path.expanduser(rest or url)))


class LocalFiles:
    """Files on a disk of this machine, or one that is mounted like it.

    Args:
        root: The folder.
    """

    traits = Traits(file_bytes=128 * 2**20, at_once=1, is_near=True)

    def __init__(self, root: Path) -> None:
        self._root = root

    def create(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        target = self._root / path
        _make_folder(target.parent)
        # A name that starts with a dot is no checkpoint's: a crash may leave it behind.
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        try:
            with open(temporary, "xb", buffering=_BUFFER_BYTES) as file:
                _write(file, parts)
                file.flush()
                os.fsync(file.fileno())
            publish(temporary, target)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        try:
            sync_folder(target.parent)
        except OSError:
            with contextlib.suppress(OSError):
                target.unlink(missing_ok=True)
            raise

    def copy(self, source: str, path: str) -> None:
        target = self._root / path
        _make_folder(target.parent)
        os.link(self._root / source, target)  # no file is ever changed
        sync_folder(target.parent)

    def read(self, path: str) -> bytes:
        return (self._root / path).read_bytes()

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        with open(self._root / path, "rb", buffering=0) as file:
            file.seek(offset)
            filled = 0
            while filled < len(buffer) and (count := file.readinto(buffer[filled:])):
                filled += count
        return filled

    def size(self, path: str) -> int:
        return (self._root / path).stat().st_size

    def names(self, folder: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self._root / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def delete(self, path: str) -> None:
        target = self._root / path
        if target.is_dir():
            _delete_folder(target)
        else:
            target.unlink(missing_ok=True)
        if target.parent.is_dir():
            sync_folder(target.parent)

    def delete_if_empty(self) -> None:
        with contextlib.suppress(OSError):
            self._root.rmdir()

    def where(self, path: str = "") -> str:
        return str(self._root / path)


def _write(file: BinaryIO, parts: Iterable[bytes | memoryview]) -> None:
    """Writes `parts`, while a thread has the disk take what was written before."""
    flushed: Future[None] = Future()
    flushed.set_result(None)
    waiting_bytes = 0
    try:
        for part in parts:
            file.write(part)
            waiting_bytes += len(part)
            if waiting_bytes >= _FLUSH_BYTES and flushed.done():
                flushed.result()
                flushed = _flush_in_thread(file.fileno())
                waiting_bytes = 0
    finally:
        wait([flushed])
    # A file tells of a failure once: the last flush would not.
    flushed.result()


def _flush_in_thread(descriptor: int) -> Future[None]:
    try:
        return in_daemon(lambda: os.fsync(descriptor), _FLUSH_THREAD)
    except RuntimeError:  # a process that has begun to end starts none: the last flush does it all
        flushed: Future[None] = Future()
        flushed.set_result(None)
        return flushed


def publish(temporary: Path, target: Path) -> None:
    """Gives the file its name, unless another one has it."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        # NFS may say so of our own link, when the first reply was lost and it asked again.
        if not os.path.samefile(temporary, target):
            raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # A file system without hard links: the one writer that a run has looks before it renames.
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        os.rename(temporary, target)


def _delete_folder(folder: Path) -> None:
    while folder.exists():
        # Another process that deletes it, too, may be ahead at any file.
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)


def _make_folder(folder: Path) -> None:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_folder(made.parent)


def sync_folder(folder: Path) -> None:
    """Makes new and deleted names in `folder` last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some mounts (FUSE, SMB) cannot do this for a folder; training on them beats refusing.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
