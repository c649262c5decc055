"""The interface to files in one folder, created once and never changed, and opening one by URL."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeGuard, runtime_checkable

from keras_distplug.core.errors import CheckpointError, ConfigurationError

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")


@dataclass(frozen=True)
class Traits:
    """Performance characteristics of a store.

    Args:
        file_bytes: The maximum size of a checkpoint file, in bytes: a failed write is repeated
            from the start of its file.
        at_once: The number of files to write concurrently.
        is_near: True if it is cheap to read back everything that was written.
    """

    file_bytes: int
    at_once: int
    is_near: bool


class NoFileError(OSError):
    """It is not a regular file, or too large to be read as a whole. Retrying does not help."""

    def __str__(self) -> str:
        return str(self.strerror)


class LinkError(NoFileError):
    """A link leads out of the run's folder."""


class Files(Protocol):
    """A folder of files. Paths are relative to it, with `/` as the separator."""

    @property
    def traits(self) -> Traits: ...

    def create(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        """Creates a file of `parts`, which is durable once this returns.

        Args:
            path: Where to create it. Its folder need not exist.
            parts: The content, in order.

        Raises:
            FileExistsError: If the file exists; it is not changed.
            OSError: If writing fails; no file of this name exists then.
        """
        ...

    def put(self, source: Path, path: str, *, overwrite: bool) -> None:
        """Copies a local file to `path`.

        Args:
            source: The local file, of any size.
            path: Where to create the copy. Its folder need not exist.
            overwrite: True to replace an existing file.

        Raises:
            FileExistsError: If the file exists and `overwrite` is false; it is not changed.
            OSError: If writing fails.
        """
        ...

    def copy(self, source: str, path: str) -> None:
        """Copies a file inside the storage, without sending its content again.

        Args:
            source: The path of the existing file.
            path: Where to create the copy. Its folder need not exist.

        Raises:
            FileExistsError: If the file exists; it is not changed.
            OSError: If copying fails, or the storage does not support it.
        """
        ...

    def read(self, path: str) -> bytes:
        """Returns the content of a file.

        Args:
            path: The path of the file.

        Raises:
            FileNotFoundError: If it does not exist; `read_into` and `size` raise it, too.
        """
        ...

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        """Fills `buffer` with the file's bytes from `offset`.

        Args:
            path: The path of the file.
            offset: Where to start, in bytes.
            buffer: Where to write the bytes.

        Returns:
            The number of bytes read; less than the size of `buffer` only at the end of the file.
        """
        ...

    def size(self, path: str) -> int:
        """Returns the size of a file in bytes.

        Args:
            path: The path of the file.
        """
        ...

    def names(self, folder: str = "") -> list[str]:
        """Returns the names of the files and folders in a folder.

        Args:
            folder: The path of the folder. Defaults to the folder of these files itself.

        Returns:
            The sorted names; empty if the folder does not exist.
        """
        ...

    def delete(self, path: str) -> None:
        """Deletes a file, or a folder with its contents. Does nothing if it does not exist.

        Args:
            path: The path of the file or folder.
        """
        ...

    def delete_if_empty(self) -> None:
        """Deletes the folder itself, if it is empty and the storage has folders."""
        ...

    def where(self, path: str = "") -> str:
        """Returns the name of `path` for messages: its URL, or its path on this machine.

        Args:
            path: The path of a file or folder. Defaults to the folder of these files itself.
        """
        ...


@runtime_checkable
class SupportsPrivateFiles(Protocol):
    """Files of a storage that can restrict reading to their owner."""

    def create_private(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        """Creates a file as `Files.create` does, readable only by its owner."""
        ...


def create_private(files: Files, path: str, parts: Iterable[bytes | memoryview]) -> None:
    """Creates a file that only its owner can read, if the store supports owners."""
    create = files.create_private if isinstance(files, SupportsPrivateFiles) else files.create
    create(path, parts)


class ObjectFiles(Files, Protocol):
    """`Files` of an object store, which can do more in one request. Optional for a store."""

    def names_below(self, folder: str) -> list[str]:
        """Returns the paths of all files below `folder`, relative to it; empty if the folder
        does not exist. Later calls of `size` for these files need no request."""
        ...

    def delete_file(self, path: str) -> None:
        """Deletes a path that is known to be a file."""
        ...


def is_object_store(files: Files) -> TypeGuard[ObjectFiles]:
    """True if `files` has the methods of `ObjectFiles`."""
    # Check the class: instances of test doubles and wrappers may have attributes of any name.
    kind = type(files)
    return all(callable(getattr(kind, name, None)) for name in ("names_below", "delete_file"))


def list_recursively(files: Files, folder: str) -> list[str] | None:
    """Returns the paths of all files below `folder`, or None if that takes more than one request.

    Raises:
        CheckpointError: If the folder cannot be listed.
    """
    if not is_object_store(files):
        return None
    try:
        return files.names_below(folder)
    except OSError as error:
        raise listing_error(files, folder, error) from error


def listing_error(files: Files, folder: str, error: OSError) -> CheckpointError:
    """Returns the error for a folder that cannot be listed."""
    return CheckpointError(f"{files.where(folder)} cannot be listed: {error}. {remedy(error)}")


def remedy(error: OSError) -> str:
    """Returns the remedy for a file or folder that cannot be read."""
    if isinstance(error, LinkError):
        return "Replace the link with its target: links out of a run's folder are not followed."
    if isinstance(error, NoFileError):
        return "Replace it with the original file."
    return "Check the storage and its permissions, then try again."


Opener = Callable[[str, Mapping[str, Any]], Files]
_METHODS = tuple(name for name in vars(Files) if not name.startswith("_"))


def _lazy_opener(module: str, opener: str, package: str | None = None) -> Opener:
    """Returns an opener that imports `stores/<module>.py` and its dependencies on first use."""

    def open_store(url: str, storage_options: Mapping[str, Any]) -> Files:
        try:
            home = importlib.import_module(f"keras_distplug.storage.stores.{module}")
            files: Files = getattr(home, opener)(url, storage_options)
        except ImportError as error:
            raise ConfigurationError(
                f"{url.partition('://')[0]}:// needs packages that cannot be imported "
                f"({error}). Run `pip install {package}`."
            ) from error
        return files

    return open_store


_LOCAL = ("file", "local")
_OURS: Mapping[str, Opener] = {
    **dict.fromkeys(_LOCAL, _lazy_opener("local", "open_local")),
    "memory": _lazy_opener("object_store", "open_memory"),
    **dict.fromkeys(("s3", "s3a"), _lazy_opener("object_store", "open_s3", "s3fs")),
    **dict.fromkeys(("gs", "gcs"), _lazy_opener("object_store", "open_gcs", "gcsfs")),
    **dict.fromkeys(("az", "abfs", "abfss"), _lazy_opener("object_store", "open_azure", "adlfs")),
    **dict.fromkeys(("sftp", "ssh"), _lazy_opener("sftp", "open_sftp", "paramiko")),
}
_OPENERS = dict(_OURS)


def register_store(scheme: str, opener: Opener) -> None:
    """Registers a store for URLs with a scheme that `keras_distplug` does not support.

    Every argument that takes a directory then accepts `<scheme>://...` in this process: call this
    in the script of all workers, before `fit`. Registering a scheme again replaces its opener, so
    that a notebook cell can run twice.

    Example:

    ```python
    from keras_distplug.storage import open_files

    def open_lab(url, storage_options):
        # Our machines mount the lab's storage at /mnt/lab.
        return open_files("/mnt/lab/" + url.removeprefix("lab://"), storage_options)

    kd.register_store("lab", open_lab)
    callbacks = kd.defaults("lab://runs/mnist")
    ```

    Args:
        scheme: What the URLs start with, without `://`: `"lab"` for `lab://host/runs/mnist`.
        opener: A function that takes the URL of a folder and `storage_options` (a dict, which may
            be empty), and returns an object with the methods of `keras_distplug.storage.Files` for
            that folder. The folder need not exist. `keras_distplug.storage.check_store` tests such
            an object.

    Raises:
        ConfigurationError: If `scheme` is not a valid URL scheme or is built into
            `keras_distplug`, or if `opener` is not callable.
    """
    if not isinstance(scheme, str) or not _SCHEME.fullmatch(scheme):
        raise ConfigurationError(
            "Expected a URL scheme without `://`: a lowercase letter, then lowercase letters, "
            f"digits, `+`, `-` or `.`. Received: {scheme!r}. Pass 'lab' for lab://host/runs."
        )
    if scheme in _OURS:
        raise ConfigurationError(
            f"Expected a scheme other than those built into keras_distplug ({', '.join(_OURS)}). "
            f"Received: {scheme!r}. Choose another scheme for your store."
        )
    if not callable(opener):
        raise ConfigurationError(
            "Expected a function that takes a URL and `storage_options` and returns an object for "
            f"that folder. Received: {opener!r}. Pass the function itself, or a class."
        )
    _OPENERS[scheme] = opener


def open_files(
    url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Files:
    """Opens the folder that `url` names. It need not exist.

    Args:
        url: A path, or a URL: `file://`, `memory://`, `s3://`, `gs://`, `az://`, `sftp://`, or one
            with a scheme passed to `register_store`.
        storage_options: Options of the store's fsspec file system, such as `endpoint_url`, or of a
            registered store. Defaults to `None`: no options.

    Raises:
        ConfigurationError: If it does not name a folder, or if packages that its store needs are
            not installed.
    """
    text = os.fspath(url)
    scheme, _, rest = text.partition("://")
    if local_path(text) is not None:
        scheme = "file"
    if scheme not in _OPENERS:
        raise ConfigurationError(
            "Expected a path, or a URL that starts with one of "
            f"{', '.join(f'{each}://' for each in _OPENERS if each not in _LOCAL)}. Received: "
            f"{scheme}://{rest.rpartition('@')[2]}. Mount other stores as a folder that all "
            "workers share; a script can also call keras_distplug.register_store() with a function "
            "that opens them."
        )
    files = _OPENERS[scheme](text, storage_options or {})
    # Methods inherited from the protocol `Files` itself do nothing.
    missing = [
        name
        for name in _METHODS
        if not hasattr(files, name) or getattr(type(files), name, None) is getattr(Files, name)
    ]
    if missing:
        raise ConfigurationError(
            f"Expected the opener of {scheme}:// to return an object with all methods of "
            f"keras_distplug.storage.Files. Received: {type(files).__name__} without "
            f"{', '.join(missing)}. Define them; keras_distplug.storage.check_store() tests them."
        )
    return files


def local_path(url: str) -> Path | None:
    """Returns the local path that `url` names, or None if it names a place in a store."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme not in _LOCAL:
        return None
    return Path(os.path.abspath(os.path.expanduser(rest or url)))
