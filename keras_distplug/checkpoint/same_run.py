"""Whether a checkpoint is of this model and of this data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras

from keras_distplug.backend.tensorflow.runtime.models import layers_of, optimizers_of
from keras_distplug.checkpoint import capture
from keras_distplug.core.errors import OtherRunError
from keras_distplug.data.sources import BATCH_SIZE
from keras_distplug.storage import manifest as manifests
from keras_distplug.storage.manifest import Manifest

OLD_SEEDS = (
    "the seeds of the data have changed since the checkpoint; the checkpoint's are used, so every "
    "epoch sees its samples in the order the run started with"
)
NEW_SEEDS = (
    "the seeds of the data have changed since the checkpoint, so samples come in another order: "
    "the interrupted epoch sees some of them twice and others not at all"
)
_BATCH_REMEDY = "allow_batch_change=True to go on with the next sample in batches of this size, "


def of_model(model: keras.Model) -> dict[str, Any]:
    """The classes of the model's layers and optimizers; JSON-able."""
    layers = {
        f"layer {number}": type(layer).__name__ for number, layer in enumerate(layers_of(model), 1)
    }
    optimizers = {name: type(each).__name__ for name, each in optimizers_of(model).items()}
    return {**layers, **optimizers}


def _first_difference(stored: Mapping[str, Any], current: Mapping[str, Any]) -> str | None:
    """Where two differ first, in words; None if they do not."""
    for name in [*stored, *(name for name in current if name not in stored)]:
        there, here = (repr(each[name]) if name in each else "none" for each in (stored, current))
        if there != here:
            return f"`{name}` is {there} there and {here} here"
    return None


def require_model(
    manifest: Manifest,
    where: str,
    model: keras.Model,
    is_of_this_script: Callable[[Mapping[str, Any]], bool],
) -> None:
    """Checks that a checkpoint is of `model`, which has the variables that it had.

    Args:
        manifest: Of the checkpoint.
        where: The run it is of.
        model: The model.
        is_of_this_script: Whether what a manifest says of how its model was built is what this
            script has built, too.

    Raises:
        OtherRunError: If it is not.
    """
    difference = manifests.first_difference(
        capture.specs_of_model(manifest.variables), capture.specs_of(model)
    ) or _first_difference(manifest.how_built["made_of"], of_model(model))
    if difference is None:
        return
    if is_of_this_script(manifest.how_built):
        raise OtherRunError(
            f"{where} holds the run of another model, or a callback has changed this one in "
            f"mid-run. The first difference: {difference}. Give another model a directory of "
            "its own, or resume=False to begin a new run beside the old one. What a callback "
            "adds to a model has to be there before `fit`. Nothing was changed."
        )
    raise OtherRunError(
        f"{where} holds the run of another model. The first difference: {difference}. Give "
        "this model a directory of its own, or resume=False to begin a new run beside the "
        "old one; nothing was changed."
    )


def is_other_data(
    there: Mapping[str, Any],
    here: Mapping[str, Any],
    where: str,
    *,
    why_not_by_samples: str | None,
    other_data: bool,
    other_batch: bool,
) -> bool:
    """Compares the fingerprints of the data, without their seeds.

    Args:
        there: That of the checkpoint.
        here: That of this `fit`.
        where: The run it is of.
        why_not_by_samples: Why the data cannot be continued at a sample, if the checkpoint is from
            within an epoch and it cannot.
        other_data: Whether the run may go on with other data.
        other_batch: Whether it may go on with the same data in batches of another size.

    Returns:
        Whether it goes on with other data.

    Raises:
        OtherRunError: If it is other data than it may be.
    """
    sizes = {each.get(BATCH_SIZE) for each in (there, here)}
    is_batch_other = len(sizes) == 2 and None not in sizes
    if other_batch and is_batch_other:
        if why_not_by_samples is None:
            there = {**there, BATCH_SIZE: here[BATCH_SIZE]}
        elif not other_data:
            raise OtherRunError(
                f"{where} was trained on global batches of {there[BATCH_SIZE]} samples, and "
                f"cannot go on with {here[BATCH_SIZE]} behind the last of them: "
                f"{why_not_by_samples}. "
                "Give the same global batch, or allow_data_change=True to begin the epoch "
                "again; nothing was changed."
            )
    difference = _first_difference(there, here)
    if difference is not None and not other_data:
        raise OtherRunError(
            f"{where} was trained on other data. The first difference: {difference}. Give the "
            f"same data, {_BATCH_REMEDY if is_batch_other else ''}"
            "allow_data_change=True to go on with these from the beginning of the epoch, or "
            "resume=False to begin a new run; nothing was changed."
        )
    return difference is not None
