"""The architecture of a run's model, stored with its checkpoints, for use without the script."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keras_distplug.core.errors import CheckpointError, CorruptCheckpointError, NoCheckpointError
from keras_distplug.core.hints import require_types
from keras_distplug.storage import layout
from keras_distplug.storage.files import Files, remedy
from keras_distplug.storage.sealed import seal, unseal


@dataclass(frozen=True)
class Architecture:
    """The architecture of a model.

    Args:
        model: Keras' serialized model, as JSON-serializable values.
        from_step: The step after which the run started to train this model.
    """

    model: Mapping[str, Any]
    from_step: int


def remember(files: Files, run: str, architecture: Architecture) -> None:
    """Adds `architecture` to the run's earlier ones, unless it equals the last of them.

    Training does not need it, so a failure only causes a warning.
    """
    try:
        numbers = [number for number, _ in layout.models(files, run)]
        if numbers and _read(files, run, numbers[-1]).model == architecture.model:
            return
    except CorruptCheckpointError:
        pass  # the next number is free
    except CheckpointError as error:
        warnings.warn(
            f"The model's architecture was not saved: {error} Training continues without it; "
            "`keras-distplug export` may only be able to write safetensors files.",
            stacklevel=2,
        )
        return
    text = seal(vars(architecture))
    path = f"{run}/{layout.model_file(max(numbers, default=0) + 1)}"
    try:
        files.create(path, [text.encode()])
    except OSError as error:
        warnings.warn(
            f"The model's architecture was not saved: {files.where(path)} could not be written: "
            f"{error}. Training continues without it; `keras-distplug export` may only be able to "
            "write safetensors files.",
            stacklevel=2,
        )


def recall(files: Files, run: str, step: int) -> Architecture:
    """Returns the architecture of the model in the checkpoint at `step`.

    Raises:
        NoCheckpointError: If it was not saved.
        CorruptCheckpointError: If it is damaged.
        CheckpointError: If it cannot be read.
    """
    known = [_read(files, run, number) for number, _ in layout.models(files, run)]
    # A run that has no checkpoint yet may have started with a different model.
    fitting = [each for each in known if each.from_step < step or not each.from_step]
    if not fitting:
        raise NoCheckpointError(
            f"{files.where(run)} does not contain the architecture of the model at step {step}. "
            "Either Keras could not serialize it, its file could not be written, an older release "
            "of keras_distplug wrote the run, or this is a copy of a checkpoint without its run's "
            "MODEL.json. `keras-distplug export` can still write a .safetensors file. For other "
            "formats, call `export(path)` of the BackupAndRestore in a script with one worker, "
            "once `fit` has started."
        )
    return fitting[-1]


def require_whole(files: Files, run: str) -> None:
    """Verifies all stored architectures of the run's models.

    Raises:
        CorruptCheckpointError: If one is damaged.
        CheckpointError: If one cannot be read.
    """
    for number, _ in layout.models(files, run):
        _read(files, run, number)


def _read(files: Files, run: str, number: int) -> Architecture:
    path = f"{run}/{layout.model_file(number)}"
    try:
        text = files.read(path)
    except OSError as error:
        raise CheckpointError(
            f"{files.where(path)} cannot be read: {error}. {remedy(error)}"
        ) from error
    try:
        architecture = Architecture(**unseal(text))
        require_types(architecture)
        return architecture
    except (ValueError, TypeError) as error:
        raise CorruptCheckpointError(
            f"{files.where(path)} is damaged: {error!r}. Restore it from a copy. Training "
            "and .safetensors exports do not need it; to export another format without it, call "
            "`export(path)` of the BackupAndRestore in a script with one worker, once `fit` has "
            "started."
        ) from error
