"""Whether a checkpoint is of this model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import keras

from keras_distplug.backend.tensorflow.runtime.models import layers_of, optimizers_of
from keras_distplug.checkpoint import capture
from keras_distplug.core.errors import OtherRunError
from keras_distplug.data.contents import CONTENTS
from keras_distplug.storage import manifest as manifests
from keras_distplug.storage import runs
from keras_distplug.storage.manifest import Manifest


def of_model(model: keras.Model) -> dict[str, Any]:
    """The classes of the model's layers and optimizers; JSON-able."""
    layers = {
        f"layer {number}": type(layer).__name__ for number, layer in enumerate(layers_of(model), 1)
    }
    optimizers = {name: type(each).__name__ for name, each in optimizers_of(model).items()}
    return {**layers, **optimizers}


def identity_of(model: keras.Model, data: Mapping[str, str]) -> runs.Identity:
    """What a `fit` trains.

    Args:
        model: The model.
        data: The contents of its data, as in `data.contents`; empty if they are not known.
    """
    # Not the optimizer's variables: that of a model that was loaded is built.
    shapes = [(each.shape, each.dtype) for each in model.weights] if model.built else None
    return runs.Identity(
        _hash(of_model(model)),
        "" if shapes is None else _hash([[list(shape), str(dtype)] for shape, dtype in shapes]),
        _hash(data[CONTENTS]) if CONTENTS in data else "",
    )


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def first_difference(stored: Mapping[str, Any], current: Mapping[str, Any]) -> str | None:
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
        *capture.comparable(manifest.variables, model)
    ) or first_difference(manifest.how_built["made_of"], of_model(model))
    if difference is None:
        return
    if is_of_this_script(manifest.how_built):
        raise OtherRunError(
            f"{where} holds the run of another model, or a callback has changed this one in "
            f"mid-run. The first difference: {difference}. Give another model a directory of "
            "its own, or resume=False to start a new run beside the old one. What a callback "
            "adds to a model has to be there before `fit`. Nothing was changed."
        )
    raise OtherRunError(
        f"{where} holds the run of another model. The first difference: {difference}. Give "
        "this model a directory of its own, or resume=False to start a new run beside the "
        "old one; nothing was changed."
    )
