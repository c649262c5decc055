"""The state of a run at one point of its training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Cursor:
    """A position in a run.

    Args:
        epoch: The next epoch, or the current one if `batch` is not 0.
        batch: Number of batches already trained in `epoch`.
        step: Number of batches trained since the start of the run.
    """

    epoch: int
    batch: int
    step: int

    def __post_init__(self) -> None:
        for name in ("epoch", "batch", "step"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"Cursor.{name} must be an int >= 0. Received: {value!r}")


@dataclass(frozen=True)
class Completion:
    """The outcome of a finished run.

    Args:
        epochs: The `epochs` argument of `fit`.
        stopped_early: True if a callback set `stop_training` before the last epoch.
    """

    epochs: int
    stopped_early: bool


@dataclass(frozen=True)
class TrainState:
    """The content of a checkpoint.

    Args:
        cursor: Position in the run.
        arrays: Variables by key (`"model/conv2d/kernel"`), in the model's order; values are
            anything that `numpy.asarray` accepts.
        history: Keras' `History.history` so far, JSON-serializable.
        history_epochs: Keras' `History.epoch` so far.
        metrics: The numeric logs at this point; they determine the best checkpoints.
        other_logs: The remaining logs, JSON-serializable.
        data: Position of the input pipeline, JSON-serializable; empty if unknown.
        stop_training: True if a callback has requested the end of training at this point.
        completion: How the run ended; None until it is complete.
        how_built: Configuration that creates the model's variables without data,
            JSON-serializable.
        callbacks: State of other callbacks, JSON-serializable; its arrays are in `arrays`.
        random: State of every worker's random generators, JSON-serializable; required only on the
            worker that writes the manifest.
    """

    cursor: Cursor
    arrays: Mapping[str, Any]
    history: Mapping[str, list[Any]] = field(default_factory=dict)
    history_epochs: tuple[int, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    other_logs: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    stop_training: bool = False
    completion: Completion | None = None
    how_built: Mapping[str, Any] = field(default_factory=dict)
    callbacks: tuple[Mapping[str, Any], ...] = ()
    random: tuple[Mapping[str, Any], ...] = ()
