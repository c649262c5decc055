"""Private names of Keras that were moved are found in the installed version's place."""

from __future__ import annotations

import types

import pytest

pytestmark = pytest.mark.tf


def test_places() -> None:
    """The first existing place is used; if there is none, the error lists all places."""
    from keras_distplug.backend.tensorflow.runtime.private_names import _first
    from keras_distplug.core.errors import VersionError

    old, new = types.ModuleType("old"), types.ModuleType("new")
    new.ops = types.ModuleType("ops")  # type: ignore[attr-defined]
    new.ops.nn = "of 3.16"
    assert _first((old, "nn"), (new, "ops.nn")) == "of 3.16"
    old.nn = "of 3.15"  # type: ignore[attr-defined]
    assert _first((old, "nn"), (new, "ops.nn")) == "of 3.15"
    with pytest.raises(VersionError, match=r"old\.gone or new\.ops\.gone to exist.*issue tracker"):
        _first((old, "gone"), (new, "ops.gone"))


def test_names() -> None:
    """The names refer to the objects that Keras itself uses."""
    import keras

    from keras_distplug.backend.tensorflow.runtime import private_names

    assert issubclass(keras.Model, private_names.Trainer)
    assert private_names.Trainer.fit is keras.Model.fit
    assert all(callable(getattr(private_names.nn, name)) for name in ("conv", "max_pool"))
    masked = keras.layers.Masking()(keras.ops.ones((1, 2, 3)))
    assert private_names.get_keras_mask(masked) is not None
