"""Determines Keras' backend without importing Keras.

Keras 3.10 to 3.15 use the environment variable `KERAS_BACKEND`, or else the file keras.json, or
else TensorFlow.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_distplug.core.errors import ConfigurationError

_VARIABLE = "KERAS_BACKEND"


def require_tensorflow() -> None:
    """Checks that Keras uses TensorFlow.

    Raises:
        ConfigurationError: If it uses another backend, or would once imported.
    """
    name = _loaded() or _configured(os.environ)
    if name != "tensorflow":
        raise ConfigurationError(
            f"Expected Keras' TensorFlow backend, the only one that keras_distplug supports. "
            f"Received: {name!r}. Set the environment variable {_VARIABLE}=tensorflow; in a "
            "script, before Keras is imported."
        )


def warn_of_distribution() -> None:
    """Warns if the script has set a `keras.distribution`, which TensorFlow's backend ignores."""
    import keras

    distribution = keras.distribution.distribution()
    if distribution is not None:
        warnings.warn(
            f"keras.distribution.set_distribution({type(distribution).__name__}) has no effect: "
            "Keras ignores it under the TensorFlow backend. Use keras_distplug.distributed_fit or "
            "a tf.distribute strategy, and remove the call.",
            stacklevel=3,
        )


def _loaded() -> str | None:
    """Returns the backend of an imported Keras."""
    config: Any = getattr(sys.modules.get("keras"), "config", None)
    return None if config is None else str(config.backend())


def _configured(environ: Mapping[str, str]) -> str:
    """Returns the backend that Keras will use once it is imported."""
    if name := environ.get(_VARIABLE):
        return name
    home = Path(environ.get("KERAS_HOME") or Path("~").expanduser() / ".keras")
    try:
        return str(json.loads((home / "keras.json").read_text("utf-8"))["backend"])
    except (OSError, ValueError, KeyError, TypeError):
        return "tensorflow"
