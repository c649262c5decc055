"""Callbacks that write files, for several workers that run the same script."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import keras

from keras_distplug.backend.tensorflow.runtime import keras_callbacks
from keras_distplug.cluster import roles
from keras_distplug.cluster.roles import Role
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.supervised import Supervised


class LeftToTheChief(keras.callbacks.Callback):  # type: ignore[misc]
    """Does nothing, in the place of a callback that the chief runs.

    Args:
        stands_for: Which one.
    """

    def __init__(self, stands_for: keras.callbacks.Callback) -> None:
        super().__init__()
        self.stands_for = stands_for


def chief_only(callback: keras.callbacks.Callback) -> keras.callbacks.Callback:
    """Lets one worker write the files of a callback.

    All workers of a cluster run the same script, with the same callbacks, and those that write
    files would write over each other's. On the chief, and in a single process, the callback stays
    as it is. On the other workers

    - `ModelCheckpoint`, `CSVLogger` and `TensorBoard`, and what is derived of them, go on as
      everywhere, because what they read of the model may take all workers; but their files go to
      a scratch folder of the worker's own machine, which is deleted when the process ends;
    - any other callback is left out. It must not do what takes all workers, such as to evaluate the
      model, or to read a variable of which each replica has its own part (those of metrics, and
      the moving statistics of `BatchNormalization`).

    Example:

    ```python
    callbacks = [*kd.defaults("runs/mnist"), kd.chief_only(keras.callbacks.CSVLogger("log.csv"))]
    model.fit(ds, epochs=10, callbacks=callbacks)
    ```

    `distributed_fit` does this with the three of Keras by itself.

    Args:
        callback: A callback of Keras', or one of your own.

    Returns:
        The callback itself, or on other workers than the chief, what stands for it.

    Raises:
        ConfigurationError: For a callback that has a say in how training goes on, such as
            `EarlyStopping`: workers that do not have it would go on in another way.
    """
    if not isinstance(callback, keras.callbacks.Callback):
        raise ConfigurationError(
            "Expected a callback of Keras'. Received an object of type "
            f"{type(callback).__name__}. Give `chief_only` each callback by itself."
        )
    if keras_callbacks.decides(callback) or type(callback).__module__.startswith("keras_distplug."):
        raise ConfigurationError(
            f"{type(callback).__name__} belongs on all workers, because training depends on it, "
            "or because it has all of them work together. Give it to `fit` without `chief_only`."
        )
    return for_role(callback, roles.from_environment(os.environ))


def for_role(callback: keras.callbacks.Callback, role: Role) -> keras.callbacks.Callback:
    """What `callback` is for a worker with this part."""
    if role.is_chief:
        return callback
    place = keras_callbacks.place_of(callback)
    if place is None:
        return LeftToTheChief(callback)
    given = os.fspath(getattr(callback, place))
    if not _is_scratch(given):
        setattr(callback, place, str(_scratch() / _name(given)))
    return callback


def writes_files(callback: keras.callbacks.Callback) -> bool:
    """Whether it is one of those that go on with a scratch folder."""
    return keras_callbacks.place_of(callback) is not None


def _name(path: str) -> str:
    """Without the parts that differ from epoch to epoch: the next file takes the place of this."""
    return re.sub(r"\{.*?\}", "", Path(path).name).lstrip(".") or "files"


_scratches: list[tempfile.TemporaryDirectory[str]] = []


def _scratch() -> Path:
    """A new folder, deleted when the process ends; or with the job, by the supervisor."""
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
