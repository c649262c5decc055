"""Files on a server, through SFTP."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import posixpath
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

# Import the class directly: the package sshfs, if installed, replaces it for this protocol.
from fsspec.implementations.sftp import SFTPFileSystem

from keras_distplug.storage.files import Opener, Traits
from keras_distplug.storage.request_body import RequestBody
from keras_distplug.storage.stores.remote import REQUEST_TIMEOUT_S, RemoteFiles


class Sftp:
    """An SFTP server."""

    @property
    def traits(self) -> Traits:
        return Traits(file_bytes=32 * 2**20, at_once=1, is_near=False)

    def connect(self, url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
        place = {**SFTPFileSystem._get_kwargs_from_urls(url), **options}
        host = place.pop("host")
        fs = SFTPFileSystem(host, **place, skip_instance_cache=True)
        fs.ftp.get_channel().settimeout(REQUEST_TIMEOUT_S)
        return fs, SFTPFileSystem._strip_protocol(url).rstrip("/")

    def create(self, fs: Any, path: str, body: RequestBody) -> None:
        with self._renamed_when_complete(fs, path, overwrite=False) as temporary:
            fs.ftp.putfo(body, temporary, file_size=len(body), confirm=True)

    def create_private(self, fs: Any, path: str, body: RequestBody) -> None:
        with self._renamed_when_complete(fs, path, overwrite=False) as temporary:
            fs.ftp.open(temporary, "wx").close()
            fs.ftp.chmod(temporary, 0o600)
            fs.ftp.putfo(body, temporary, file_size=len(body), confirm=True)

    def put(self, fs: Any, source: str, path: str, overwrite: bool) -> None:
        with self._renamed_when_complete(fs, path, overwrite) as temporary:
            fs.ftp.put(source, temporary, confirm=True)

    @contextlib.contextmanager
    def _renamed_when_complete(self, fs: Any, path: str, overwrite: bool) -> Iterator[str]:
        folder, name = posixpath.split(path)
        _make_folder(fs, folder)
        temporary = f"{folder}/.{name}.{uuid.uuid4().hex}.tmp"
        try:
            yield temporary
            if overwrite:
                fs.ftp.posix_rename(temporary, path)
            else:
                self._rename_exclusively(fs, temporary, path)
        except BaseException:
            with contextlib.suppress(Exception):
                fs.ftp.remove(temporary)
            raise

    def _rename_exclusively(self, fs: Any, temporary: str, path: str) -> None:
        try:
            # Of SFTP's two rename operations, this one fails if the name is taken. OpenSSH
            # implements it with a hard link, so only one of two writers succeeds.
            fs.ftp.rename(temporary, path)
        except OSError:  # without a reason
            if fs.exists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
            raise

    def read(self, fs: Any, path: str, start: int, end: int) -> bytes:
        if start == end:
            return b""
        with fs.ftp.open(path, "rb") as file:
            return b"".join(file.readv([(start, end - start)]))

    def copy(self, fs: Any, source: str, path: str) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), path)

    def delete(self, fs: Any, path: str) -> None:
        if fs.isdir(path):
            for inside in fs.ls(path):
                self.delete(fs, inside)
            fs.ftp.rmdir(path)
        else:
            fs.ftp.remove(path)


def _make_folder(fs: Any, folder: str) -> None:
    for _ in folder.split("/"):
        # Another writer may make one of these folders at the same time.
        with contextlib.suppress(OSError):
            fs.makedirs(folder, exist_ok=True)
            return
    fs.makedirs(folder, exist_ok=True)


open_sftp: Opener = functools.partial(RemoteFiles, Sftp())
