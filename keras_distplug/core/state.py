"""What a run is at one instant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Cursor:
    """A place in a run.

    Args:
        epoch: The epoch that comes next, or is under way when `batch` is not 0.
        batch: Batches already trained in `epoch`.
        step: Batches trained since the run began.
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
    """How a run ended.

    Args:
        epochs: The `epochs` that `fit` was asked for.
        stopped_early: True when a callback set `stop_training` before that.
    """

    epochs: int
    stopped_early: bool


@dataclass(frozen=True)
class TrainState:
    """Everything that a checkpoint holds.

    Args:
        cursor: Where the run stands.
        arrays: Variables by key (`"model/conv2d/kernel"`), in the model's order. Each value is
            anything `numpy.asarray` takes.
        history: Keras' `History.history` up to here, JSON-able.
        history_epochs: Keras' `History.epoch` up to here.
        metrics: Those of the logs at this point that are numbers; by them the best checkpoints are
            kept.
        other_logs: The rest of the logs, JSON-able.
        data: Position of the input pipeline, JSON-able; empty when it is not known.
        stop_training: True if a callback has asked for the end of training at this point.
        completion: Set once the run has reached its end.
        how_built: What makes the model's variables without data, JSON-able.
        callbacks: What other callbacks know, JSON-able; the arrays in it are among `arrays`.
        random: The random generators of each worker's process, JSON-able; needed on the worker that
            writes the manifest.
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
