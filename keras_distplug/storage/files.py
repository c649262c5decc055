"""Files under one folder, created once and never changed, and what opens them by their URL."""

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


class NoFileError(OSError):
    """This is not a regular file, or too large to be read at once. Retrying does not help."""

    def __str__(self) -> str:
        return str(self.strerror)


class LinkError(NoFileError):
    """A link leads out of the run's folder."""


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

    def put(self, source: Path, path: str, *, overwrite: bool) -> None:
        """Makes a file that holds what the local file `source` does, however large it is.

        Raises:
            FileExistsError: If it exists and is not to be overwritten; it is untouched.
            OSError: If that fails.
        """
        ...

    def copy(self, source: str, path: str) -> None:
        """Makes a file that holds what the file `source` does, without writing that again.

        Raises:
            FileExistsError: If it exists; it is untouched.
            OSError: If that fails, or the storage has nothing of the kind.
        """
        ...

    def read(self, path: str) -> bytes:
        """The content of a file.

        Raises:
            FileNotFoundError: If there is none, here as in `read_into` and `size`.
        """
        ...

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
        """How to name `path` to a person; by its URL, unless it is a path of this machine."""
        ...


@runtime_checkable
class HasOwners(Protocol):
    """Files whose owner can keep others from reading them."""

    def create_private(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        """Does what `Files.create` does; only the owner can read the file."""
        ...


def create_private(files: Files, path: str, parts: Iterable[bytes | memoryview]) -> None:
    """Creates a file that only its owner can read, where the store has owners."""
    create = files.create_private if isinstance(files, HasOwners) else files.create
    create(path, parts)


class ObjectFiles(Files, Protocol):
    """`Files` of an object store, which does more with one request. Optional for a store."""

    def names_below(self, folder: str) -> list[str]:
        """The paths, from `folder`, of all files below it; empty if there is no such folder. Later
        calls of `size` for these files need no request."""
        ...

    def delete_file(self, path: str) -> None:
        """As `delete`, of what is known to be a file."""
        ...


def is_object_store(files: Files) -> TypeGuard[ObjectFiles]:
    """Whether `files` have the methods of `ObjectFiles`."""
    # By the class: test doubles and wrappers may answer to any name.
    kind = type(files)
    return all(callable(getattr(kind, name, None)) for name in ("names_below", "delete_file"))


def list_recursively(files: Files, folder: str) -> list[str] | None:
    """Returns the paths of all files below `folder`, or None if that takes more than one request.

    Raises:
        CheckpointError: If it cannot be listed.
    """
    if not is_object_store(files):
        return None
    try:
        return files.names_below(folder)
    except OSError as error:
        raise unlistable(files, folder, error) from error


def unlistable(files: Files, folder: str, error: OSError) -> CheckpointError:
    """The error of a folder that cannot be listed."""
    return CheckpointError(f"{files.where(folder)} cannot be listed: {error}. {remedy(error)}")


def remedy(error: OSError) -> str:
    """What to do about a file or folder that cannot be read."""
    if isinstance(error, LinkError):
        return "Replace the link by what it leads to: links out of a run's folder are not followed."
    return "Check the storage and its permissions, then start the script again."


Opener = Callable[[str, Mapping[str, Any]], Files]
_METHODS = tuple(name for name in vars(Files) if not name.startswith("_"))


def _on_demand(module: str, opener: str, package: str | None = None) -> Opener:
    """Return an opener that loads `stores/<module>.py`, and what that imports, when it is used."""

    def open_store(url: str, storage_options: Mapping[str, Any]) -> Files:
        try:
            home = importlib.import_module(f"keras_distplug.storage.stores.{module}")
            files: Files = getattr(home, opener)(url, storage_options)
        except ImportError as error:
            raise ConfigurationError(
                f"{url.partition('://')[0]}:// needs packages that are not installed ({error}). "
                f"Run pip install {package}."
            ) from error
        return files

    return open_store


_LOCAL = ("file", "local")
_OURS: Mapping[str, Opener] = {
    **dict.fromkeys(_LOCAL, _on_demand("local", "open_local")),
    "memory": _on_demand("object_store", "open_memory"),
    **dict.fromkeys(("s3", "s3a"), _on_demand("object_store", "open_s3", "s3fs")),
    **dict.fromkeys(("gs", "gcs"), _on_demand("object_store", "open_gcs", "gcsfs")),
    **dict.fromkeys(("az", "abfs", "abfss"), _on_demand("object_store", "open_azure", "adlfs")),
    **dict.fromkeys(("sftp", "ssh"), _on_demand("sftp", "open_sftp", "paramiko")),
}
_OPENERS = dict(_OURS)


def register_store(scheme: str, opener: Opener) -> None:
    """Register a store for URLs of a scheme that `keras_distplug` does not know.

    Every argument that takes a directory then accepts `<scheme>://...`, in this process: call it
    in the script of all workers, before `fit`. If a scheme is registered again, the last opener
    counts, so that a cell of a notebook can run twice.

    Example:

    ```python
    from keras_distplug.storage import open_files

    def open_lab(url, storage_options):
        # Our machines mount the lab's storage at /mnt/lab.
        return open_files("/mnt/lab/" + url.removeprefix("lab://"), storage_options)

    keras_distplug.register_store("lab", open_lab)
    callbacks = keras_distplug.defaults("lab://runs/mnist")
    ```

    Args:
        scheme: What the URLs start with, without `://`: `"lab"` for `lab://host/runs/mnist`.
        opener: A function of the URL of a folder and of `storage_options` (a dict, which may be
            empty) that returns an object with the methods of `keras_distplug.storage.Files` for
            that folder. The folder need not exist. `keras_distplug.storage.check_store` tests such
            an object.

    Raises:
        ConfigurationError: If `scheme` is no scheme of a URL or is one that `keras_distplug`
            handles, or if `opener` is not callable.
    """
    if not isinstance(scheme, str) or not _SCHEME.fullmatch(scheme):
        raise ConfigurationError(
            "Expected a URL scheme without `://`: a lowercase letter, then lowercase letters, "
            f"digits, `+`, `-` or `.`. Received: {scheme!r}. Pass 'lab' for lab://host/runs."
        )
    if scheme in _OURS:
        raise ConfigurationError(
            f"Expected a scheme that keras_distplug does not handle itself ({', '.join(_OURS)}). "
            f"Received: {scheme!r}. Choose another one for your store."
        )
    if not callable(opener):
        raise ConfigurationError(
            "Expected a function of a URL and `storage_options` that returns the files of that "
            f"folder. Received: {opener!r}. Pass the function itself, or a class."
        )
    _OPENERS[scheme] = opener


def open_files(
    url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Files:
    """The folder that `url` names. It need not exist.

    Args:
        url: A path, or a URL: `file://`, `memory://`, `s3://`, `gs://`, `az://`, `sftp://`, or of a
            scheme given to `register_store`.
        storage_options: What the store's fsspec file system takes, such as `endpoint_url`; or what
            a registered store takes.

    Raises:
        ConfigurationError: If it names no folder, or what its store needs is not installed.
    """
    text = os.fspath(url)
    scheme, _, rest = text.partition("://")
    if local_path(text) is not None:
        scheme = "file"
    if scheme not in _OPENERS:
        raise ConfigurationError(
            "Expected a folder, or a URL that begins with one of "
            f"{', '.join(each for each in _OPENERS if each not in _LOCAL)}. Received: "
            f"{scheme}://{rest.rpartition('@')[2]}. Mount other stores as a folder that all "
            "workers share, or give keras_distplug.register_store() a function that opens them."
        )
    files = _OPENERS[scheme](text, storage_options or {})
    # What a class inherits from `Files` itself does nothing.
    missing = [
        name
        for name in _METHODS
        if not hasattr(files, name) or getattr(type(files), name, None) is getattr(Files, name)
    ]
    if missing:
        raise ConfigurationError(
            f"Expected what opens {scheme}:// to return an object with all methods of "
            f"keras_distplug.storage.Files. Received: {type(files).__name__} without "
            f"{', '.join(missing)}. Define them; keras_distplug.storage.check_store() tests them."
        )
    return files


def local_path(url: str) -> Path | None:
    """The path that `url` names; None if it names a place in a store."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme not in _LOCAL:
        return None
    return Path(os.path.abspath(os.path.expanduser(rest or url)))
