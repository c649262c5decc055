"""The interface between `BackupAndRestore` and the callbacks of other features."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from keras_distplug.callbacks.watchdog import Watchdog
from keras_distplug.storage.files import Files


@dataclass(frozen=True)
class RunContext:
    """The run in progress.

    Args:
        files: The directory that contains this run and others.
        name: The run's folder in that directory.
        directory: The directory as passed by the user.
        storage_options: The storage options as passed by the user.
    """

    files: Files
    name: str
    directory: Any
    storage_options: Mapping[str, Any]


class RunKeeper(Watchdog, abc.ABC):
    """The part of `BackupAndRestore` that other features use without importing `checkpoint/`."""

    delete_checkpoint: bool  # True if the run's files are deleted when training finishes

    @property
    @abc.abstractmethod
    def context(self) -> RunContext:
        """The run in progress.

        Raises:
            RuntimeError: If no run is in progress.
        """

    @abc.abstractmethod
    def keep_file(self, name: str, parts: Iterable[bytes | memoryview]) -> str:
        """Creates a file next to the runs, readable only by its owner. Thread-safe.

        Returns:
            The file's location.

        Raises:
            OSError: If the file cannot be written.
        """

    @abc.abstractmethod
    def save_before_leaving(
        self, logs: Mapping[str, Any] | None, left_s: float | None
    ) -> int | None:
        """Saves a checkpoint after the batch or epoch that has just ended, and waits for it.

        All workers must call it together, from a hook of another callback that runs after those of
        this one. The caller then ends `fit`.

        Args:
            logs: The logs that the hook received.
            left_s: The time available, in seconds; None if unlimited.

        Returns:
            The step of the newest checkpoint made by this `fit`; None if it has made none.
        """

    @abc.abstractmethod
    def roll_back(self) -> int | None:
        """Restores the newest checkpoint into the model; `fit` continues with the next batch. The
        updates since the checkpoint are discarded, and their batches are not trained on again.

        All workers must call it together, from another callback's `on_train_batch_end`. It waits
        for a save in progress. The state of other callbacks and `History` are not restored.

        Returns:
            The step of the checkpoint; None without a checkpoint.

        Raises:
            CheckpointError: If a checkpoint cannot be read, or all are damaged.
        """


def keeper_among(callbacks: Sequence[keras.callbacks.Callback]) -> RunKeeper | None:
    """Returns the first `RunKeeper` among `callbacks`, or None."""
    return next((each for each in callbacks if isinstance(each, RunKeeper)), None)
