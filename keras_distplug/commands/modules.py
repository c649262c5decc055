"""Loads TensorFlow and the user's classes for commands that build a model."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from keras_distplug.checkpoint import trusted_config
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.storage.store import Stored


def load_needed(model: Mapping[str, Any], stored: Stored, modules: Collection[str]) -> None:
    """Imports the modules that a model needs, unless its description cannot be trusted.

    Args:
        model: The description of the model.
        stored: The checkpoint whose values the model will receive.
        modules: The names of the user's modules.

    Raises:
        CorruptCheckpointError: If the files of the checkpoint do not match its manifest. The
            description is checked against the variables in the manifest.
        ModelError: If the description is refused. In that case, neither TensorFlow nor `modules`
            are imported.
        ConfigurationError: If a module cannot be imported.
        UnsupportedVersionError: If this package does not support the installed versions.
    """
    stored.require_files()
    trusted_config.require_trusted_before_imports(model, stored.manifest, modules)
    load(modules)


def load(modules: Iterable[str]) -> None:
    """Checks the versions of TensorFlow and Keras, and imports `modules`.

    Raises:
        ConfigurationError: If a module cannot be imported.
        UnsupportedVersionError: If this package does not support the installed versions.
    """
    from keras_distplug.backend.tensorflow.runtime import versions

    versions.check()
    # The working folder is not on the path of a command that pip installed.
    sys.path.insert(0, "")
    try:
        for module in modules:
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise ConfigurationError(
                    f"--import {module} failed: {error}. If {module} itself was not found, run "
                    "the command in its folder, or add that folder to PYTHONPATH. Otherwise, "
                    "install what it imports."
                ) from error
    finally:
        sys.path.remove("")
