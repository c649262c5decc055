"""What a command needs that makes a model: TensorFlow, and the user's classes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from keras_distplug.checkpoint import trusted_config
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.storage.store import Stored


def load_for(model: Mapping[str, Any], stored: Stored, modules: Collection[str]) -> None:
    """Imports what a model needs, unless its description cannot be trusted.

    Args:
        model: The description of the model.
        stored: The checkpoint that it is for.
        modules: The user's.

    Raises:
        CorruptCheckpointError: If the checkpoint's files are not those of its manifest, by whose
            variables the description is checked.
        ModelError: If the description is refused. Neither TensorFlow nor `modules` are imported
            then.
        ConfigurationError: As `load` does.
        UnsupportedVersionError: As `load` does.
    """
    stored.require_files()
    trusted_config.require_trusted_before_imports(model, stored.manifest, modules)
    load(modules)


def load(modules: Iterable[str]) -> None:
    """Checks the versions of TensorFlow and Keras, and imports `modules`.

    Raises:
        ConfigurationError: If a module cannot be imported.
        UnsupportedVersionError: For versions that this package does not run on.
    """
    from keras_distplug.backend.tensorflow.runtime import versions

    versions.check()
    # A command that pip has installed does not look into the working folder.
    sys.path.insert(0, "")
    try:
        for module in modules:
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise ConfigurationError(
                    f"--import {module} failed: {error}. Run the command in the folder of your "
                    "script, or set PYTHONPATH."
                ) from error
    finally:
        sys.path.remove("")
