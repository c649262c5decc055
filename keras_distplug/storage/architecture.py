"""How the model of a run is made, kept beside its checkpoints, for those who have no script."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from keras_distplug.core.errors import CheckpointError, CorruptCheckpointError, NoCheckpointError
from keras_distplug.core.hints import require_types
from keras_distplug.storage import layout
from keras_distplug.storage.files import Files
from keras_distplug.storage.sealed import seal, unseal


@dataclass(frozen=True)
class Architecture:
    """How a model is made.

    Args:
        model: What Keras says of it, JSON-able.
        from_step: The step behind which the run trained it.
    """

    model: Mapping[str, Any]
    from_step: int


def remember(files: Files, run: str, architecture: Architecture) -> None:
    """Writes `architecture` beside those before, if it is another one than the last of them.

    Training does without it, so failing is a warning only.
    """
    try:
        numbers = [number for number, _ in layout.models(files, run)]
        if numbers and _read(files, run, numbers[-1]).model == architecture.model:
            return
    except CorruptCheckpointError:
        pass  # the next number is free
    except CheckpointError as error:
        warnings.warn(f"Not told how the model is made: {error}", stacklevel=2)
        return
    text = seal(asdict(architecture))
    path = f"{run}/{layout.model_file(max(numbers, default=0) + 1)}"
    try:
        files.create(path, [text.encode()])
    except OSError as error:
        warnings.warn(
            f"{files.where(path)} could not be written: {error}. Training goes on without; "
            "`keras-distplug export` will only have safetensors files to give.",
            stacklevel=2,
        )


def recall(files: Files, run: str, step: int) -> Architecture:
    """How the model of the checkpoint at `step` is made.

    Raises:
        NoCheckpointError: If that is not known.
        CorruptCheckpointError: If it is damaged.
        CheckpointError: If it cannot be read.
    """
    known = [_read(files, run, number) for number, _ in layout.models(files, run)]
    # A run that had no checkpoint yet may have begun with another model.
    fitting = [each for each in known if each.from_step < step or not each.from_step]
    if not fitting:
        raise NoCheckpointError(
            f"{files.where(run)} has no {layout.model_file(1)}: it was not told how its model is "
            "made, because Keras cannot serialize it, or by a release that did not ask. Call "
            "`callback.export(path)` of the BackupAndRestore in the training script, or export to "
            "a .safetensors file."
        )
    return fitting[-1]


def require_whole(files: Files, run: str) -> None:
    """Reads all that is known of the run's models.

    Raises:
        CorruptCheckpointError: If something is damaged.
        CheckpointError: If something cannot be read.
    """
    for number, _ in layout.models(files, run):
        _read(files, run, number)


def _read(files: Files, run: str, number: int) -> Architecture:
    path = f"{run}/{layout.model_file(number)}"
    try:
        text = files.read(path)
    except OSError as error:
        raise CheckpointError(f"{files.where(path)} cannot be read: {error}.") from error
    try:
        architecture = Architecture(**unseal(text))
        require_types(architecture)
        return architecture
    except (ValueError, TypeError) as error:
        raise CorruptCheckpointError(
            f"{files.where(path)} is damaged: {error!r}. Put it back from a copy, or call "
            "`callback.export(path)` in the training script."
        ) from error
