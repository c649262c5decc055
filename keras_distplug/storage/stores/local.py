"""Files on a local or mounted disk."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, BinaryIO

from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.operating_system import flags
from keras_distplug.core.threads import run_in_daemon
from keras_distplug.storage import layout
from keras_distplug.storage.files import Files, LinkError, NoFileError, Traits, local_path

_BUFFER_BYTES = 2**18  # for small parts; larger ones bypass it
_FLUSH_BYTES = 16 * 2**20
_FLUSH_THREAD = "keras_distplug-flush"
_MOST_BYTES = 2**30  # the maximum for files that are read as a whole
_NO_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class LocalFiles:
    """Files on a local or mounted disk.

    Args:
        root: The folder.
    """

    traits = Traits(file_bytes=128 * 2**20, at_once=1, is_near=True)

    def __init__(self, root: Path) -> None:
        self._root = root

    def create(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        with self._renamed_when_complete(path) as file:
            _write(file, parts)

    def create_private(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        with self._renamed_when_complete(path, mode=0o600) as file:
            _write(file, parts)

    def put(self, source: Path, path: str, *, overwrite: bool) -> None:
        with (
            self._renamed_when_complete(path, overwrite=overwrite) as file,
            source.open("rb") as data,
        ):
            shutil.copyfileobj(data, file, _FLUSH_BYTES)

    @contextlib.contextmanager
    def _renamed_when_complete(
        self, path: str, *, overwrite: bool = False, mode: int = 0o666
    ) -> Iterator[BinaryIO]:
        target = self.inside(path)
        _make_folder(target.parent)
        # This file may survive a crash; readers ignore names that start with a dot.
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        try:
            opener = functools.partial(os.open, mode=mode)
            with open(temporary, "xb", buffering=_BUFFER_BYTES, opener=opener) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            publish(temporary, target, overwrite=overwrite)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        try:
            sync_folder(target.parent)
        except OSError:
            if not overwrite:
                with contextlib.suppress(OSError):
                    target.unlink(missing_ok=True)
            raise

    def copy(self, source: str, path: str) -> None:
        target = self.inside(path)
        _make_folder(target.parent)
        if not hasattr(os, "link"):
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), str(target))
        os.link(self.inside(source), target)  # safe: files never change
        sync_folder(target.parent)

    def read(self, path: str) -> bytes:
        with _open_regular(self.inside(path)) as file:
            count = os.fstat(file.fileno()).st_size
            if count > _MOST_BYTES:
                message = f"expected at most {_MOST_BYTES} bytes, received {count}"
                raise NoFileError(errno.EFBIG, message, str(self._root / path))
            return file.read()

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        with _open_regular(self.inside(path)) as file:
            file.seek(offset)
            filled = 0
            while filled < len(buffer) and (count := file.readinto(buffer[filled:])):
                filled += count
        return filled

    def size(self, path: str) -> int:
        found = self.inside(path).stat()
        _require_regular(found.st_mode, self._root / path)
        return found.st_size

    def names(self, folder: str = "") -> list[str]:
        try:
            # A folder that contains runs may be a link to any place.
            is_in_run = layout.is_run(self._root.name) or layout.find_run_folder(folder) is not None
            return sorted(os.listdir(self.inside(folder) if is_in_run else self._root / folder))
        except OSError as error:
            if error.errno in _NO_FOLDER:
                return []
            raise

    def delete(self, path: str) -> None:
        target = self._root / path
        place = self._link_boundary(path)
        for part in target.relative_to(place).parts[:-1]:
            place /= part
            if place.is_symlink():
                return  # a link may be deleted, but never anything inside its target
        if target.is_dir() and not target.is_symlink():
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

    def inside(self, path: str) -> Path:
        """Returns the full path.

        Raises:
            LinkError: If a link in it leads out of the run's folder or, for a file outside of runs,
                out of the folder that contains them.
        """
        full = self._root / path
        top = place = self._link_boundary(path)
        for part in full.relative_to(top).parts:
            place /= part
            if place.is_symlink():
                found, home = Path(os.path.realpath(full)), Path(os.path.realpath(top))
                if not found.is_relative_to(home):
                    message = f"it is a link to {found}, outside of {top}"
                    raise LinkError(errno.EINVAL, message, str(full))
                break
        return full

    def _link_boundary(self, path: str) -> Path:
        """Returns the folder that links in `path` must stay in. It may be a link itself."""
        if layout.is_run(self._root.name):
            return self._root
        run = layout.find_run_folder(path)
        return self._root / ("/".join(path.split("/")[:-2]) if run is None else run)


def open_local(url: str, storage_options: Mapping[str, Any]) -> Files:
    """Opens the folder that a path, or the URL of a path, names. It need not exist.

    Raises:
        ConfigurationError: If it is not a folder.
    """
    root = local_path(url)
    assert root is not None, url
    if storage_options:
        raise ConfigurationError(
            "Expected `storage_options` only with the URL of a store, such as s3://bucket/runs. "
            f"Received: {url!r}, a local folder. Remove `storage_options`."
        )
    first = next((path for path in (root, *root.parents) if os.path.lexists(path)), root)
    if not first.is_dir():
        raise ConfigurationError(
            f"Expected a folder. Received: {url!r}, where {first} is a file or a broken link. "
            "Choose another folder."
        )
    return LocalFiles(root)


def _open_regular(path: Path) -> io.FileIO:
    """Opens a regular file for reading. Rejects FIFOs, which could block, and devices."""
    _require_regular(path.stat().st_mode, path)
    file = io.FileIO(os.open(path, flags("O_RDONLY", "O_NONBLOCK", "O_CLOEXEC")))
    try:
        _require_regular(os.fstat(file.fileno()).st_mode, path)
    except BaseException:
        file.close()
        raise
    return file


def _require_regular(mode: int, path: Path) -> None:
    if stat.S_ISDIR(mode):
        raise NoFileError(errno.EISDIR, "it is a folder, not a file", str(path))
    if not stat.S_ISREG(mode):
        raise NoFileError(errno.EINVAL, f"it is {_kind(mode)}, not a regular file", str(path))


def _kind(mode: int) -> str:
    named = {stat.S_ISFIFO: "a FIFO", stat.S_ISSOCK: "a socket"}
    return next((name for is_it, name in named.items() if is_it(mode)), "a device")


def _write(file: BinaryIO, parts: Iterable[bytes | memoryview]) -> None:
    """Writes `parts`, while a thread flushes earlier ones to the disk."""
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
    # The system reports a failed flush only once: the final flush would not raise it again.
    flushed.result()


def _flush_in_thread(descriptor: int) -> Future[None]:
    try:
        return run_in_daemon(lambda: os.fsync(descriptor), _FLUSH_THREAD)
    except RuntimeError:  # no threads can start at exit: the final flush does everything
        flushed: Future[None] = Future()
        flushed.set_result(None)
        return flushed


def publish(temporary: Path, target: Path, *, overwrite: bool = False) -> None:
    """Renames the file to its final name, which must be free unless `overwrite` is true."""
    if overwrite:
        os.replace(temporary, target)
        return
    try:
        if not hasattr(os, "link"):
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), str(target))
        os.link(temporary, target)
    except FileExistsError:
        # NFS may report our own link, if the first reply was lost and it sent the request again.
        if not os.path.samefile(temporary, target):
            raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # No hard links: check, then rename. A run has only one writer: nothing interferes.
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        os.rename(temporary, target)


def _delete_folder(folder: Path) -> None:
    while folder.exists():
        # Another process may be deleting the same folder, and delete any of the files first.
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)


def _make_folder(folder: Path) -> None:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_folder(made.parent)


def sync_folder(folder: Path) -> None:
    """Makes created and deleted names in `folder` durable, if the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some mounts (FUSE, SMB) cannot sync a folder. Training on them is better than refusing.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
