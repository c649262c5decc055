"""Runs file-writing callbacks on the chief only, if several workers run the same script."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import keras

from keras_distplug.backend.tensorflow.runtime import keras_callbacks
from keras_distplug.callbacks.watchdog import require_made
from keras_distplug.cluster import roles
from keras_distplug.cluster.roles import Role
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.supervised import Supervised


class ChiefOnlyPlaceholder(keras.callbacks.Callback):  # type: ignore[misc]
    """A placeholder that does nothing, for a callback that only the chief runs.

    Args:
        stands_for: The callback that it replaces.
    """

    def __init__(self, stands_for: keras.callbacks.Callback) -> None:
        super().__init__()
        self.stands_for = stands_for


def chief_only(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    """Lets only the chief write a callback's files.

    All workers of a cluster run the same script with the same callbacks, so file-writing callbacks
    would overwrite each other's files. On the chief, and in a single process, the callback is
    returned unchanged. On the other workers:

    - `ModelCheckpoint`, `CSVLogger`, `TensorBoard` and their subclasses still run, because reading
      the model may require all workers. They write to a scratch folder on the worker's machine,
      which is deleted when the process exits.
    - Any other callback is replaced by one that does nothing. It must not perform operations that
      require all workers, such as evaluating the model or reading a variable that is split over
      the replicas (variables of metrics, and the moving statistics of `BatchNormalization`).

    Example:

    ```python
    callbacks = [*kd.defaults("runs/mnist"), kd.chief_only(keras.callbacks.CSVLogger("log.csv"))]
    model.fit(ds, epochs=10, callbacks=callbacks)
    ```

    `distributed_fit` does this automatically for the three Keras callbacks.

    Args:
        callback: A Keras callback, built-in or custom.

    Returns:
        The callback itself, or its replacement on workers other than the chief.

    Raises:
        ConfigurationError: If the callback influences training, such as `EarlyStopping`: workers
            without it would train differently.
    """
    require_made([callback])
    if not isinstance(callback, keras.callbacks.Callback):
        raise ConfigurationError(
            f"Expected a Keras callback. Received: an object of type {type(callback).__name__}. "
            "Wrap every callback in its own `chief_only(...)`."
        )
    if keras_callbacks.decides(callback) or type(callback).__module__.startswith("keras_distplug."):
        raise ConfigurationError(
            f"{type(callback).__name__} must run on all workers, because it influences training or "
            "coordinates the workers. Pass it to `fit` without `chief_only`."
        )
    return for_role(callback, roles.from_environment(os.environ))


def for_role(callback: keras.callbacks.Callback, role: Role) -> keras.callbacks.Callback:
    """Returns the callback that a worker with this role should run instead of `callback`."""
    if role.is_chief:
        return callback
    place = keras_callbacks.find_place(callback)
    if place is None:
        return ChiefOnlyPlaceholder(callback)
    given = os.fspath(getattr(callback, place))
    if not _is_scratch(given):
        setattr(callback, place, str(_scratch() / _name(given)))
    return callback


def writes_files(callback: keras.callbacks.Callback) -> bool:
    """True if the callback is one that runs with a scratch folder on other workers."""
    return keras_callbacks.find_place(callback) is not None


def _name(path: str) -> str:
    """Removes placeholders such as `{epoch}` from a file name, so that every new file overwrites
    the previous one."""
    return re.sub(r"\{.*?\}", "", Path(path).name).lstrip(".") or "files"


_scratches: list[tempfile.TemporaryDirectory[str]] = []


def _scratch() -> Path:
    """Creates a folder that is deleted when the process exits, or by the supervisor when the job
    ends."""
    supervised = Supervised.from_env()
    above = supervised.status_dir if supervised is not None else None
    folder = tempfile.TemporaryDirectory(
        prefix="keras-distplug-scratch-",
        dir=above if above is not None and above.is_dir() else None,
        ignore_cleanup_errors=True,
    )
    _scratches.append(folder)
    return Path(folder.name)


def _is_scratch(path: str) -> bool:
    return any(Path(path).is_relative_to(folder.name) for folder in _scratches)
