"""A file that somebody else writes, and that gets its name once it is complete."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keras_distplug.core.errors import CheckpointError, ConfigurationError
from keras_distplug.storage.files import local_path, open_files
from keras_distplug.storage.stores.local import publish, sync_folder


@contextmanager
def written(
    out: str, ending: str, storage_options: Mapping[str, Any] | None = None, *, overwrite: bool
) -> Iterator[Path]:
    """A path to write to, whose file becomes `out` at the end.

    Args:
        out: A path, or a URL of a store.
        ending: How the path to write to ends.
        storage_options: What the store's fsspec file system takes.
        overwrite: Whether a file of this name may be replaced.

    Raises:
        ConfigurationError: At the beginning, if `out` cannot be.
        CheckpointError: If it cannot be written. A file that was there is untouched then.
    """
    path = local_path(out)
    place = _in_store(out, ending, storage_options, overwrite) if path is None else None
    with place or _in_folder(path or Path(), ending, overwrite) as temporary:
        yield temporary


@contextmanager
def _in_folder(target: Path, ending: str, overwrite: bool) -> Iterator[Path]:
    if target.is_dir() or not target.parent.is_dir():
        raise ConfigurationError(f"Expected a file in a folder that is there. Received: {target}")
    if os.path.lexists(target) and not overwrite:
        raise _exists(str(target))
    temporary = target.with_name(f".{target.stem}-{uuid.uuid4().hex}{ending}")
    try:
        yield temporary
        with open(temporary, "r+b") as file:  # Windows flushes only what can be written
            os.fsync(file.fileno())
        publish(temporary, target, overwrite=overwrite)
        sync_folder(target.parent)
    except FileExistsError as error:
        raise _exists(str(target)) from error
    except OSError as error:
        raise _not_written(str(target), error) from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _in_store(
    out: str, ending: str, storage_options: Mapping[str, Any] | None, overwrite: bool
) -> Iterator[Path]:
    folder, _, name = out.rpartition("/")
    if not name or folder.endswith(":/"):
        raise ConfigurationError(f"Expected a file in a folder of a store. Received: {out!r}")
    files = open_files(folder, storage_options)
    where = files.where(name)
    try:
        if name in files.names() and not overwrite:
            raise _exists(where)
        with tempfile.TemporaryDirectory(prefix="keras_distplug-") as scratch:
            temporary = Path(scratch) / f"export{ending}"
            yield temporary
            files.put(temporary, name, overwrite=overwrite)
    except FileExistsError as error:
        raise _exists(where) from error
    except OSError as error:
        raise _not_written(where, error) from error


def _exists(where: str) -> ConfigurationError:
    return ConfigurationError(
        f"{where} exists, and stays as it is. Give another name, or --overwrite (overwrite=True in "
        "a script)."
    )


def _not_written(where: str, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{where} could not be written: {error}. Free disk space, or give another path."
    )
