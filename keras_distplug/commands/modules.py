"""What a command needs that makes a model: TensorFlow, and the user's classes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable

from keras_distplug.core.errors import ConfigurationError


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
