"""Files in an object store or on a server, through fsspec.

Every file is written by one request: it exists as a whole or not at all, a killed writer leaves
no part of it, and object stores create it only if the name is free. On a server that exposes
files while they are written, they are written under a temporary name and renamed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import posixpath
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit, urlunsplit

import fsspec
import stamina

from keras_distplug.core.threads import within
from keras_distplug.storage.files import Traits
from keras_distplug.storage.request_body import RequestBody

REQUEST_TIMEOUT_S = 120.0
# Retries would not change these.
_PERMANENT_ERRORS = (FileNotFoundError, FileExistsError, NotADirectoryError)
_REFUSALS = (401, 403)
# Temporary refusals: a token that is about to be renewed, and a clock that is being set.
_TEMPORARY_REFUSALS = ("ExpiredToken", "RequestTimeTooSkewed")
_SECRET = ("key", "secret", "token", "password", "passphrase", "credential", "connection_string")
T = TypeVar("T")


class Store(Protocol):
    """The operations that differ between kinds of stores. Paths are those of the fsspec file system
    `fs`."""

    @property
    def traits(self) -> Traits: ...

    def connect(self, url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
        """Returns the file system, and the path in it that `url` names."""
        ...

    def create(self, fs: Any, path: str, body: RequestBody) -> None: ...

    def create_private(self, fs: Any, path: str, body: RequestBody) -> None: ...

    def put(self, fs: Any, source: str, path: str, overwrite: bool) -> None: ...

    def read(self, fs: Any, path: str, start: int, end: int) -> bytes: ...

    def copy(self, fs: Any, source: str, path: str) -> None: ...

    def delete(self, fs: Any, path: str) -> None: ...


class _Limited:
    """An fsspec file system whose requests are cancelled after a timeout.

    A thread cannot be killed, and s3fs retries requests on its own: without this, a file could
    appear minutes after its save was abandoned.
    """

    def __init__(self, fs: Any, timeout_s: float) -> None:
        self._fs = fs
        self._timeout_s = timeout_s

    def within(self, timeout_s: float) -> _Limited:
        """Returns the same file system with another timeout."""
        return _Limited(self._fs, timeout_s)

    def __getattr__(self, name: str) -> Any:
        coroutine = getattr(self._fs, f"_{name}", None) if self._fs.async_impl else None
        if coroutine is None:
            return getattr(self._fs, name)
        sync = fsspec.asyn.sync
        return functools.partial(sync, self._fs.loop, coroutine, timeout=self._timeout_s)


class RemoteFiles:
    """Files below a URL.

    Args:
        store: The kind of store.
        url: The URL of the folder.
        options: Options of the fsspec file system. Their secrets do not appear in errors.
        timeout_s: The timeout of a request, in seconds. Defaults to 120.
    """

    def __init__(
        self,
        store: Store,
        url: str,
        options: Mapping[str, Any],
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        # Raises now, rather than at the first request, if the store's package is not installed.
        fsspec.get_filesystem_class(urlsplit(url).scheme)
        self._store = store
        self._url = url
        self._options = options
        self._timeout_s = timeout_s
        self._secrets = sorted(
            {*_find_secrets(options), *_find_password(url)}, key=len, reverse=True
        )
        self._connections: dict[int, tuple[Any, str]] = {}  # by process: they do not survive a fork
        self._sizes: dict[str, int] = {}
        self._connecting = threading.Lock()
        # A connection that cannot handle concurrent requests gets one at a time.
        one = threading.Lock() if self.traits.at_once == 1 else contextlib.nullcontext()
        self._request_lock: contextlib.AbstractContextManager[Any] = one

    @property
    def traits(self) -> Traits:
        return self._store.traits

    def create(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        self._create(self._store.create, path, parts)

    def create_private(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        self._create(self._store.create_private, path, parts)

    def _create(
        self,
        create: Callable[[Any, str, RequestBody], None],
        path: str,
        parts: Iterable[bytes | memoryview],
    ) -> None:
        body = RequestBody(parts)
        try:
            self._ask(path, lambda fs, full: create(fs, full, body))
        except FileNotFoundError as error:
            text = f"{self.where()}: no such bucket or folder, or no permission to create it"
            raise FileNotFoundError(errno.ENOENT, text) from error

    def put(self, source: Path, path: str, *, overwrite: bool) -> None:
        requests = 1 + source.stat().st_size // self.traits.file_bytes
        timeout_s = requests * self._timeout_s

        def put(fs: Any, full: str) -> None:
            self._store.put(fs.within(timeout_s), str(source), full, overwrite)

        self._sizes.pop(path, None)
        self._ask(path, put, timeout_s)

    def copy(self, source: str, path: str) -> None:
        def copy(fs: Any, full: str) -> None:
            root = full[: len(full) - len(path)]
            self._store.copy(fs, root + source, full)

        self._ask(path, copy)

    def read(self, path: str) -> bytes:
        data: bytes = self._retry_request(path, lambda fs, full: fs.cat_file(full))
        return data

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        end = min(offset + len(buffer), self.size(path))
        if offset >= end:
            return 0

        def read(fs: Any, full: str) -> bytes:
            data = self._store.read(fs, full, offset, end)
            if len(data) != end - offset:
                raise OSError(
                    f"expected {end - offset} bytes from offset {offset}, received {len(data)}"
                )
            return data

        buffer[: end - offset] = self._retry_request(path, read)
        return end - offset

    def size(self, path: str) -> int:
        # Files never change.
        if path not in self._sizes:
            self._sizes[path] = self._retry_request(path, lambda fs, full: int(fs.size(full)))
        return self._sizes[path]

    def names(self, folder: str = "") -> list[str]:
        def names(fs: Any, full: str) -> list[str]:
            try:
                found = fs.ls(full, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
            listed = ((each["name"].rstrip("/"), each) for each in found)
            inside = {
                posixpath.basename(path): each for path, each in listed if not full.endswith(path)
            }
            # Files never change.
            self._sizes |= {
                posixpath.join(folder, name): int(each["size"])
                for name, each in inside.items()
                if each["type"] == "file" and each["size"] is not None
            }
            return sorted(inside)

        return self._retry_request(folder, names)

    def delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._retry_request(path, self._store.delete)
        self._forget_sizes(path)

    def _forget_sizes(self, path: str) -> None:
        for known in [each for each in self._sizes if f"{each}/".startswith(f"{path}/")]:
            self._sizes.pop(known, None)

    def delete_if_empty(self) -> None:
        return  # object stores have no folders, and an empty one on a server does no harm

    def where(self, path: str = "") -> str:
        parts = urlsplit(self._url)
        netloc = parts.netloc.rpartition("@")[2] if ":" in parts.netloc else parts.netloc
        base = urlunsplit((parts.scheme, netloc, parts.path, "", "")).rstrip("/")
        return f"{base}/{path}" if path else base

    def _retry_request(self, path: str, request: Callable[[Any, str], T]) -> T:
        for attempt in stamina.retry_context(_is_transient, attempts=5, timeout=30.0):
            with attempt:
                return self._ask(path, request)
        raise AssertionError("stamina raises the last error")

    def _ask(
        self, path: str, request: Callable[[Any, str], T], timeout_s: float | None = None
    ) -> T:
        """Returns the result of `request`, called with the file system and the full path. All
        errors are converted to OSError."""

        left_behind = threading.Event()

        def ask() -> T:
            with self._request_lock:
                fs, root = self._connection()
                # A file that arrives long after its save was abandoned could mix with another
                # save's.
                if left_behind.is_set():
                    raise TimeoutError("the connection was established too late")
                return request(fs, f"{root}/{path}" if path else root)

        try:
            return within(timeout_s or self._timeout_s, ask, "keras_distplug-request")
        except _PERMANENT_ERRORS:
            raise
        except Exception as error:  # noqa: BLE001 (every store's library has its own errors)
            left_behind.set()
            # A connection that has failed may never answer again.
            self._connections.pop(os.getpid(), None)
            raise self._translate_error(error) from None

    def _connection(self) -> tuple[Any, str]:
        with self._connecting:
            process = os.getpid()
            if process not in self._connections:
                fs, root = self._store.connect(self._url, self._options)
                self._connections[process] = _Limited(fs, self._timeout_s), root
            return self._connections[process]

    def _translate_error(self, error: Exception) -> OSError:
        if isinstance(error, fsspec.exceptions.FSTimeoutError):
            return TimeoutError(f"no answer within {self._timeout_s:g} s per request")
        # s3fs passes on the store's message only, but Ceph sends just a code, without a message.
        said = error.__cause__ if error.__cause__ and str(error) in ("", "None") else error
        text = f"{type(error).__name__}: {said}" if str(said) else type(error).__name__
        for secret in self._secrets:
            text = text.replace(secret, "***")
        translated = _error_type(error)(text)
        translated.errno = error.errno if isinstance(error, OSError) else None
        return translated


def _is_transient(error: Exception) -> bool:
    return isinstance(error, OSError) and not isinstance(
        error, (*_PERMANENT_ERRORS, PermissionError)
    )


def _error_type(error: Exception) -> type[OSError]:
    if isinstance(error, TimeoutError):
        return TimeoutError
    # Every store's library reports this differently, often in the cause of the error.
    causes = [error, error.__cause__] if error.__cause__ else [error]
    if any(word in str(each) for each in causes for word in _TEMPORARY_REFUSALS):
        return OSError
    is_refused = any(
        isinstance(each, PermissionError) or _http_status(each) in _REFUSALS for each in causes
    )
    return PermissionError if is_refused else OSError


def _http_status(error: BaseException) -> object:
    """Returns the HTTP status of `error`, in the attribute that adlfs or gcsfs uses."""
    return getattr(error, "status_code", None) or getattr(error, "code", None)


def _find_secrets(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _find_secrets(value)
        elif isinstance(value, str) and value and any(word in name.lower() for word in _SECRET):
            yield value
            # The secrets in Azure's connection strings.
            yield from re.findall(r"(?:AccountKey|SharedAccessSignature)=([^;]+)", value)


def _find_password(url: str) -> Iterator[str]:
    with contextlib.suppress(ValueError):
        if password := urlsplit(url).password:
            yield password
