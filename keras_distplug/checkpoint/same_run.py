"""Checks that a checkpoint was made with the same model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import keras

from keras_distplug.backend.tensorflow.runtime.models import list_layers, list_optimizers
from keras_distplug.checkpoint import capture
from keras_distplug.core.errors import OtherRunError
from keras_distplug.data.contents import CONTENTS
from keras_distplug.storage import manifest as manifests
from keras_distplug.storage import runs
from keras_distplug.storage.manifest import Manifest


def describe_model(model: keras.Model) -> dict[str, Any]:
    """Returns the classes of the model's layers and optimizers; JSON-able."""
    layers = {
        f"layer {number}": type(layer).__name__
        for number, layer in enumerate(list_layers(model), 1)
    }
    optimizers = {name: type(each).__name__ for name, each in list_optimizers(model).items()}
    return {**layers, **optimizers}


def compute_identity(model: keras.Model, data: Mapping[str, str]) -> runs.Identity:
    """Returns the identity of what a `fit` trains.

    Args:
        model: The model.
        data: The fingerprints of its data, as in `data.contents`; empty if they are not known.
    """
    # Without the optimizer's variables: a loaded model's optimizer is already built.
    shapes = [(each.shape, each.dtype) for each in model.weights] if model.built else None
    return runs.Identity(
        _hash(describe_model(model)),
        "" if shapes is None else _hash([[list(shape), str(dtype)] for shape, dtype in shapes]),
        _hash(data[CONTENTS]) if CONTENTS in data else "",
    )


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def first_difference(stored: Mapping[str, Any], current: Mapping[str, Any]) -> str | None:
    """Describes the first difference between two descriptions; None if they are equal."""
    for name in [*stored, *(name for name in current if name not in stored)]:
        there, here = (repr(each[name]) if name in each else "none" for each in (stored, current))
        if there != here:
            return f"`{name}` was {there} at the checkpoint and is now {here}"
    return None


def require_model(
    manifest: Manifest,
    where: str,
    model: keras.Model,
    matches_script: Callable[[Mapping[str, Any]], bool],
) -> None:
    """Checks that a checkpoint is of `model`, which must already have all its variables.

    Args:
        manifest: The checkpoint's manifest.
        where: The run's location, for errors.
        model: The model.
        matches_script: Returns True if the given `Manifest.how_built` matches what this script
            has built.

    Raises:
        OtherRunError: If the checkpoint is of another model.
    """
    difference = manifests.first_difference(
        *capture.comparable(manifest.variables, model)
    ) or first_difference(manifest.how_built["made_of"], describe_model(model))
    if difference is None:
        return
    if matches_script(manifest.how_built):
        raise OtherRunError(
            f"{where} holds the run of another model, or a callback changed this model "
            f"mid-run. First difference: {difference}. If this is a different model, give it a "
            "separate directory, or pass resume=False to start a new run next to the old one. If a "
            "callback added something to the model, add it before `fit` instead. Nothing was "
            "changed."
        )
    raise OtherRunError(
        f"{where} holds the run of another model. First difference: {difference}. Give "
        "this model a separate directory, or pass resume=False to start a new run next to "
        "the old one. Nothing was changed."
    )
