"""An output file that gets its name only once it is complete."""

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
    """Yields a temporary path to write to, whose file becomes `out` at the end.

    Args:
        out: A path, or a URL of a store.
        ending: The extension of the temporary path.
        storage_options: Options of the store's fsspec file system. Defaults to `None`: no options.
        overwrite: If `True`, an existing file of this name is replaced.

    Raises:
        ConfigurationError: On entry, if `out` is not usable.
        CheckpointError: If it cannot be written. An existing file is not changed then.
    """
    path = local_path(out)
    place = _in_store(out, ending, storage_options, overwrite) if path is None else None
    with place or _in_folder(path or Path(), ending, overwrite) as temporary:
        yield temporary


@contextmanager
def _in_folder(target: Path, ending: str, overwrite: bool) -> Iterator[Path]:
    if target.is_dir() or not target.parent.is_dir():
        raise ConfigurationError(
            f"Expected the path of a file in a folder that exists. Received: {target}. Create its "
            "folder first; if the path itself is a folder, add a file name."
        )
    if os.path.lexists(target) and not overwrite:
        raise _exists_error(str(target))
    temporary = target.with_name(f".{target.stem}-{uuid.uuid4().hex}{ending}")
    try:
        yield temporary
        with open(temporary, "r+b") as file:  # Windows only flushes files opened for writing
            os.fsync(file.fileno())
        publish(temporary, target, overwrite=overwrite)
        sync_folder(target.parent)
    except FileExistsError as error:
        raise _exists_error(str(target)) from error
    except OSError as error:
        raise _write_error(str(target), error) from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _in_store(
    out: str, ending: str, storage_options: Mapping[str, Any] | None, overwrite: bool
) -> Iterator[Path]:
    folder, _, name = out.rpartition("/")
    if not name or folder.endswith(":/"):
        raise ConfigurationError(
            "Expected the URL of a file in a folder, such as s3://bucket/exports/model.keras. "
            f"Received: {out!r}"
        )
    files = open_files(folder, storage_options)
    where = files.where(name)
    try:
        if name in files.names() and not overwrite:
            raise _exists_error(where)
        with tempfile.TemporaryDirectory(prefix="keras_distplug-") as scratch:
            temporary = Path(scratch) / f"export{ending}"
            yield temporary
            files.put(temporary, name, overwrite=overwrite)
    except FileExistsError as error:
        raise _exists_error(where) from error
    except OSError as error:
        raise _write_error(where, error) from error


def _exists_error(where: str) -> ConfigurationError:
    return ConfigurationError(
        f"{where} already exists and was not changed. Choose another name, or pass --overwrite "
        "(overwrite=True in a script)."
    )


def _write_error(where: str, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{where} could not be written: {error}. Check the free space and the permissions there, "
        "or choose another path."
    )
