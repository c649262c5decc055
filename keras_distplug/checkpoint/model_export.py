"""Exports a checkpoint's model as Keras' own files."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from keras_distplug.backend.tensorflow.runtime import models
from keras_distplug.checkpoint import capture
from keras_distplug.checkpoint.imported_names import ImportedNames
from keras_distplug.checkpoint.trusted_config import (
    EXPORT_INSTEAD,
    list_elements,
    not_rebuilt,
    require_trusted,
)
from keras_distplug.core.errors import ConfigurationError, OtherRunError
from keras_distplug.storage.manifest import Manifest, first_difference

Values = Callable[..., Iterable[tuple[str, Any]]]  # takes `capture.allocate`

_SHARED = "shared_object_id"
_VALUES_OF_METRICS = 2**28  # largest size of metrics and other variables outside a checkpoint


def get_architecture(model: keras.Model) -> Mapping[str, Any] | None:
    """Returns the JSON-able input of `save_rebuilt`; None if Keras cannot serialize `model`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about lambdas, for example: nothing is loaded here
            config: dict[str, Any] = json.loads(json.dumps(models.serialize(model)))
    except Exception:  # noqa: BLE001 (a custom `get_config` can raise anything)
        return None
    _renumber(config, {})
    return config


def _renumber(config: Any, numbers: dict[int, int]) -> None:
    """Numbers shared objects in order. Keras uses their addresses, with which the same model would
    differ between processes."""
    if isinstance(config, dict):
        if isinstance(number := config.get(_SHARED), int):
            config[_SHARED] = numbers.setdefault(number, len(numbers))
        config = list(config.values())
    if isinstance(config, list):
        for each in config:
            _renumber(each, numbers)


def save_rebuilt(
    architecture: Mapping[str, Any], manifest: Manifest, values: Values, path: Path
) -> None:
    """Builds a model from its architecture, fills it from a checkpoint, and saves it.

    Args:
        architecture: The result of `get_architecture`.
        manifest: The checkpoint's manifest.
        values: Reads the checkpoint's values.
        path: The file to write; ends with `.keras` or `.weights.h5`.

    Raises:
        ConfigurationError: If called in a strategy's scope, which would capture the model.
        ModelError: If the model cannot be built.
        OtherRunError: If the checkpoint does not fit it.
        CorruptCheckpointError: If the checkpoint is damaged.
    """
    with rebuilt(architecture, manifest, values) as model:
        _save(model, path)


@contextmanager
def rebuilt(
    architecture: Mapping[str, Any], manifest: Manifest, values: Values
) -> Iterator[keras.Model]:
    """Builds a model from its architecture, and fills it from a checkpoint.

    Args:
        architecture: The result of `get_architecture`.
        manifest: The checkpoint's manifest.
        values: Reads the checkpoint's values.

    Raises:
        DistplugError: As from `save_rebuilt`.
    """
    if tf.distribute.has_strategy():
        raise ConfigurationError(
            "A model cannot be exported within the scope of a strategy. Call `export` outside the "
            "scope."
        )
    with models.random_state_kept():
        model = _rebuilt(architecture, manifest)
        _fill(model, manifest, values, by_path=False)
        yield model


def save_through(model: keras.Model, manifest: Manifest, values: Values, path: Path) -> None:
    """Fills `model` from a checkpoint, saves it, and restores its previous values.

    Both sets of values are in memory until then.

    Args:
        model: The model in training, even mid-training.
        manifest: The checkpoint's manifest.
        values: Reads the checkpoint's values.
        path: The file to write; ends with `.keras` or `.weights.h5`.

    Raises:
        OtherRunError: If the checkpoint does not fit the model.
        CorruptCheckpointError: If the checkpoint is damaged.
    """
    capture.build(model, manifest.how_built)
    capture.build_optimizers(model, manifest.how_built)
    before = capture.capture(model)
    try:
        _fill(model, manifest, values, by_path=True)
        _save(model, path)
    finally:
        capture.put_back(model, before)


def _rebuilt(architecture: Mapping[str, Any], manifest: Manifest) -> keras.Model:
    # Without `build_config`, with which Keras gives other names than in a first call.
    config = {name: value for name, value in architecture.items() if name != "build_config"}
    elements = list_elements(manifest)
    try:
        require_trusted(architecture, elements, ImportedNames())
        with models.variables_limited(2 * elements + _VALUES_OF_METRICS):
            model = models.deserialize(config)
            capture.build(model, manifest.how_built)
            capture.build_optimizers(model, manifest.how_built)
        model.built = True  # Keras itself sets it only after a first call
    except Exception as error:
        raise not_rebuilt(error) from error
    if models.optimizer_targets(model) != manifest.how_built["optimizers"]:
        raise OtherRunError(
            "The optimizer of the rebuilt model does not train the same variables as the optimizer "
            f"in the checkpoint. {EXPORT_INSTEAD}"
        )
    return model


def _fill(model: keras.Model, manifest: Manifest, values: Values, *, by_path: bool) -> None:
    stored = capture.specs_of_model(manifest.variables)
    difference = first_difference(stored, capture.make_specs(model), by_path=by_path)
    if difference is not None:
        which, remedy = (
            "The model rebuilt from the saved architecture does not have",
            EXPORT_INSTEAD,
        )
        if by_path:  # the model in training
            which = "The model no longer has"
            remedy = "Export it before changing it, or to a .safetensors file."
        raise OtherRunError(
            f"{which} the variables of the checkpoint. First difference: {difference}. {remedy}"
        )
    keys = [spec.key for spec in stored]
    capture.restore(model, keys, _model_values(values(capture.allocate), set(keys)))


def _model_values(values: Iterable[tuple[str, Any]], keys: set[str]) -> Iterator[tuple[str, Any]]:
    """Skips the state of `keras.random`, which belongs to the process; Keras' files lack it."""
    for key, value in values:
        if key in keys:
            yield key, value
        del value  # frees its memory for the next one


def _save(model: keras.Model, path: Path) -> None:
    if path.name.endswith(".keras"):
        model.save(path)
    else:
        model.save_weights(path)
