"""Files on a disk of this machine, or one that is mounted like it."""

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
from keras_distplug.core.threads import in_daemon
from keras_distplug.storage import layout
from keras_distplug.storage.files import Files, LinkError, NoFileError, Traits, local_path

_BUFFER_BYTES = 2**18  # for small parts; larger ones pass it by
_FLUSH_BYTES = 16 * 2**20
_FLUSH_THREAD = "keras_distplug-flush"
_MOST_BYTES = 2**30  # for files that are read as a whole
_NO_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class LocalFiles:
    """Files on a disk of this machine, or one that is mounted like it.

    Args:
        root: The folder.
    """

    traits = Traits(file_bytes=128 * 2**20, at_once=1, is_near=True)

    def __init__(self, root: Path) -> None:
        self._root = root

    def create(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        with self._named_afterwards(path) as file:
            _write(file, parts)

    def create_private(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        with self._named_afterwards(path, mode=0o600) as file:
            _write(file, parts)

    def put(self, source: Path, path: str, *, overwrite: bool) -> None:
        with self._named_afterwards(path, overwrite=overwrite) as file, source.open("rb") as data:
            shutil.copyfileobj(data, file, _FLUSH_BYTES)

    @contextlib.contextmanager
    def _named_afterwards(
        self, path: str, *, overwrite: bool = False, mode: int = 0o666
    ) -> Iterator[BinaryIO]:
        target = self.inside(path)
        _make_folder(target.parent)
        # A name that starts with a dot is no checkpoint's: a crash may leave it behind.
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
        os.link(self.inside(source), target)  # no file is ever changed
        sync_folder(target.parent)

    def read(self, path: str) -> bytes:
        with _open_regular(self.inside(path)) as file:
            count = os.fstat(file.fileno()).st_size
            if count > _MOST_BYTES:
                told = f"it has {count} bytes, expected at most {_MOST_BYTES}"
                raise NoFileError(errno.EFBIG, told, str(self._root / path))
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
            # A folder with runs may be a link to anywhere.
            is_in_run = layout.is_run(self._root.name) or layout.run_folder_of(folder) is not None
            return sorted(os.listdir(self.inside(folder) if is_in_run else self._root / folder))
        except OSError as error:
            if error.errno in _NO_FOLDER:
                return []
            raise

    def delete(self, path: str) -> None:
        target = self._root / path
        place = self._top_of(path)
        for part in target.relative_to(place).parts[:-1]:
            place /= part
            if place.is_symlink():
                return  # only the link itself is deleted, never what it leads to
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
            LinkError: If a link in it leads out of the run's folder; of a file beside runs, out of
                the folder that holds them.
        """
        full = self._root / path
        top = place = self._top_of(path)
        for part in full.relative_to(top).parts:
            place /= part
            if place.is_symlink():
                found, home = Path(os.path.realpath(full)), Path(os.path.realpath(top))
                if not found.is_relative_to(home):
                    told = f"it leads to {found}, outside of {top}"
                    raise LinkError(errno.EINVAL, told, str(full))
                break
        return full

    def _top_of(self, path: str) -> Path:
        """The folder that links in `path` must not lead out of. It may be a link itself."""
        if layout.is_run(self._root.name):
            return self._root
        run = layout.run_folder_of(path)
        return self._root / ("/".join(path.split("/")[:-2]) if run is None else run)


def open_local(url: str, storage_options: Mapping[str, Any]) -> Files:
    """The folder that a path, or a URL of one, names. It need not exist.

    Raises:
        ConfigurationError: If it is none.
    """
    root = local_path(url)
    assert root is not None, url
    if storage_options:
        raise ConfigurationError(
            f"`storage_options` is for URLs of a store. Received: {url!r}, a folder."
        )
    first = next((path for path in (root, *root.parents) if os.path.lexists(path)), root)
    if not first.is_dir():
        raise ConfigurationError(
            f"Expected a folder. Received: {url!r}, where {first} is a "
            "file, or a link to nothing. Give another folder."
        )
    return LocalFiles(root)


def _open_regular(path: Path) -> io.FileIO:
    """Opens a regular file for reading. FIFOs, which could block, and devices are refused."""
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


def publish(temporary: Path, target: Path, *, overwrite: bool = False) -> None:
    """Gives the file its name, unless another one has it that is not to be overwritten."""
    if overwrite:
        os.replace(temporary, target)
        return
    try:
        if not hasattr(os, "link"):
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), str(target))
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
    """Makes new and deleted names in `folder` last, where the system can do that."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some mounts (FUSE, SMB) cannot do this for a folder; training on them beats refusing.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
