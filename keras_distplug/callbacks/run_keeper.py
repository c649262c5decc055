"""What the callbacks of other features ask of the one that keeps the run."""

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
    """The run under way.

    Args:
        files: The directory that holds the run, and others.
        name: The run's folder in it.
        directory: The directory as the user gave it.
        storage_options: As the user gave them.
    """

    files: Files
    name: str
    directory: Any
    storage_options: Mapping[str, Any]


class RunKeeper(Watchdog, abc.ABC):
    """`BackupAndRestore`, as other features see it: they import nothing of the checkpoints."""

    delete_checkpoint: bool  # whether nothing of the run is left when it has ended

    @property
    @abc.abstractmethod
    def context(self) -> RunContext:
        """The run under way.

        Raises:
            RuntimeError: If there is none.
        """

    @abc.abstractmethod
    def keep_file(self, name: str, parts: Iterable[bytes | memoryview]) -> str:
        """Creates a file beside the runs that only its owner can read. From any thread.

        Returns:
            Where it is.

        Raises:
            OSError: If that fails.
        """

    @abc.abstractmethod
    def save_before_leaving(
        self, logs: Mapping[str, Any] | None, left_s: float | None
    ) -> int | None:
        """Makes a checkpoint behind the batch, or epoch, that has just ended, and waits for it.

        All workers call it together, from another callback's hook that comes behind those of this
        one. Whoever calls it ends `fit`.

        Args:
            logs: What the hook was given.
            left_s: How much time there is; None for as long as it takes.

        Returns:
            The step of the newest checkpoint that this `fit` has made; None if there is none.
        """

    @abc.abstractmethod
    def roll_back(self) -> int | None:
        """Gives the model the values of the newest checkpoint; `fit` goes on with the batch that
        comes next. What was trained since counts for nothing, and is not trained again.

        All workers call it together, from another callback's `on_train_batch_end`. A save under way
        is waited for. What other callbacks know stays, and so does `History`.

        Returns:
            The step of the checkpoint; None if there is none.

        Raises:
            CheckpointError: If one cannot be read, or all are damaged.
        """


def keeper_among(callbacks: Sequence[keras.callbacks.Callback]) -> RunKeeper | None:
    """The first one that keeps a run."""
    return next((each for each in callbacks if isinstance(each, RunKeeper)), None)
