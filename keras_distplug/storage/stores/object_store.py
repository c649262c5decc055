"""Object stores. A file is written by one request, which can be made to fail if the file exists."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import posixpath
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec

from keras_distplug.storage.files import Opener, Traits
from keras_distplug.storage.request_body import RequestBody
from keras_distplug.storage.stores.remote import RemoteFiles

_MEMORY = threading.Lock()


@dataclass(frozen=True)
class ObjectStore:
    """Amazon S3 and similar stores.

    Args:
        defaults: Default options of its file system. Defaults to none.
        copies: True if a copy is complete when the request returns. Defaults to `True`.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    copies: bool = True

    @property
    def traits(self) -> Traits:
        return Traits(file_bytes=32 * 2**20, at_once=4, is_near=False)

    def connect(self, url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
        chosen = {**self.defaults, **options}
        # Use a new instance: fsspec's cached ones are shared, and useless after a fork. Cached
        # listings would hide files that other workers write.
        fs, path = fsspec.core.url_to_fs(
            url, **chosen, use_listings_cache=False, skip_instance_cache=True
        )
        return fs, path.rstrip("/")

    def create(self, fs: Any, path: str, body: RequestBody) -> None:
        with _file_exists_errors(fs, path):
            fs.pipe_file(path, self._payload(body), mode="create")

    def create_private(self, fs: Any, path: str, body: RequestBody) -> None:
        self.create(fs, path, body)  # read access is a setting of the bucket

    def _payload(self, body: RequestBody) -> Any:
        return bytes(body)

    def put(self, fs: Any, source: str, path: str, overwrite: bool) -> None:
        if overwrite:
            fs.put_file(source, path, mode="overwrite")
            return
        with _file_exists_errors(fs, path):
            fs.put_file(source, path, mode="create")

    def read(self, fs: Any, path: str, start: int, end: int) -> bytes:
        data: bytes = fs.cat_file(path, start=start, end=end)
        return data

    def copy(self, fs: Any, source: str, path: str) -> None:
        if not self.copies:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), path)
        if fs.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        fs.cp_file(source, path)

    def delete(self, fs: Any, path: str) -> None:
        fs.rm(path, recursive=True)


@contextlib.contextmanager
def _file_exists_errors(fs: Any, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # s3fs translates Ceph's answer to EINVAL.
        if error.errno == errno.EINVAL and fs.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from error
        raise


@dataclass(frozen=True)
class S3Store(ObjectStore):
    """Amazon S3 and compatible stores."""

    def _payload(self, body: RequestBody) -> Any:
        # s3fs sends larger bodies in several requests and slices them, so it needs bytes.
        return body if len(body) <= 2 * self.traits.file_bytes else bytes(body)


@dataclass(frozen=True)
class AzureStore(ObjectStore):
    """Azure Blob Storage and compatible stores."""

    def connect(self, url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
        fs, path = super().connect(url, options)
        # The SDK retries on its own, after 15 seconds and more, and adlfs has no option for that.
        # `RemoteFiles` retries sooner, and with a time limit.
        client = getattr(fs.service_client, "_config", None)
        if policy := getattr(client, "retry_policy", None):
            policy.total_retries = 0
        return fs, path


class RemoteObjects(RemoteFiles):
    """Files in an object store, which lists all files below a folder with one request per page."""

    def names_below(self, folder: str) -> list[str]:
        def below(fs: Any, full: str) -> dict[str, int]:
            try:
                found = fs.find(full, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
            # Some stores return paths with a leading slash before the bucket, others without.
            paths = ((path.lstrip("/"), info) for path, info in found.items())
            start = full.lstrip("/") + "/"
            return {
                path.removeprefix(start): int(info["size"])
                for path, info in paths
                if path.startswith(start) and info["type"] == "file" and info["size"] is not None
            }

        sizes = self._retry_request(folder, below)
        self._forget_sizes(folder)
        self._sizes |= {posixpath.join(folder, path): size for path, size in sizes.items()}
        return sorted(sizes)

    def delete_file(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._retry_request(path, lambda fs, full: fs.rm_file(full))
        self._forget_sizes(path)


class MemoryStore(ObjectStore):
    """The memory of this process. Locked, because fsspec checks for a file and creates it in two
    steps, and its `put_file` exposes a file while it is written."""

    def create(self, fs: Any, path: str, body: RequestBody) -> None:
        with _MEMORY:
            super().create(fs, path, body)

    def put(self, fs: Any, source: str, path: str, overwrite: bool) -> None:
        data = Path(source).read_bytes()
        with _MEMORY:
            fs.pipe_file(path, data, mode="overwrite" if overwrite else "create")


open_memory: Opener = functools.partial(RemoteObjects, MemoryStore())
open_s3: Opener = functools.partial(
    RemoteObjects,
    # Requests have a checksum anyway, and signing the payload takes as long as sending it.
    S3Store({"config_kwargs": {"s3": {"payload_signing_enabled": False}}}),
)
open_gcs: Opener = functools.partial(RemoteObjects, ObjectStore())
open_azure: Opener = functools.partial(RemoteObjects, AzureStore(copies=False))
