"""Private names of Keras that were moved between versions. They are looked up only here.

Keras 3.10 to 3.15, and the nightly builds of 3.16, which moves them for pluggable backends
(keras-team/keras#23397, keras-team/keras#23642). If a name is in none of its known places, a
`VersionError` is raised.
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
    """Returns the object at the first place that exists; places are in order of versions."""
    for owner, dotted in places:
        found = owner
        for name in dotted.split("."):
            found = getattr(found, name, _MISSING)
        if found is not _MISSING:
            return found
    tried = " or ".join(f"{owner.__name__}.{dotted}" for owner, dotted in places)
    raise versions.missing_name(f"{tried} to exist")


# The class that defines `fit`, renamed in 3.16.
Trainer = _first((trainer, "TensorFlowTrainer"), (trainer, "Trainer"))
# The module with `conv` and similar functions, which layers and `keras.ops` call.
nn = _first((backend, "nn"), (backend, "ops.nn"))
get_keras_mask = _first((backend, "get_keras_mask"), (masking, "get_keras_mask"))


def start(enqueuer: Any) -> None:
    """Starts an `OrderedEnqueuer`, to which Keras 3.16 gives the epoch that orders follow from."""
    has_epoch = "epoch" in inspect.signature(enqueuer.start).parameters
    enqueuer.start(**({"epoch": 0} if has_epoch else {}))
