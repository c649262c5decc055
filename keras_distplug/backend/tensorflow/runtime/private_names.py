"""Private names of Keras that moved, each looked up here only.

Keras 3.10 to 3.15, and the nightly builds of 3.16, which moves them for pluggable backends
(keras-team/keras#23397, keras-team/keras#23642). A name that is in none of its places is a
`VersionError`.
"""

from __future__ import annotations

import inspect
from typing import Any

from keras.src import backend
from keras.src.backend.common import masking
from keras.src.backend.tensorflow import trainer

from keras_distplug.backend.tensorflow.runtime import versions

_MISSING = object()


def _first(*places: tuple[Any, str]) -> Any:
    """Returns what the first of these dotted names leads to, the oldest version's first."""
    for owner, dotted in places:
        found = owner
        for name in dotted.split("."):
            found = getattr(found, name, _MISSING)
        if found is not _MISSING:
            return found
    tried = " or ".join(f"{owner.__name__}.{dotted}" for owner, dotted in places)
    raise versions.missing_name(f"{tried} to exist")


# The class that has `fit`: another name since 3.16.
Trainer = _first((trainer, "TensorFlowTrainer"), (trainer, "Trainer"))
# `conv` and others, as layers and `keras.ops` call them.
nn = _first((backend, "nn"), (backend, "ops.nn"))
get_keras_mask = _first((backend, "get_keras_mask"), (masking, "get_keras_mask"))


def start(enqueuer: Any) -> None:
    """Starts an `OrderedEnqueuer`, to which Keras 3.16 gives the epoch that orders follow from."""
    has_epoch = "epoch" in inspect.signature(enqueuer.start).parameters
    enqueuer.start(**({"epoch": 0} if has_epoch else {}))
