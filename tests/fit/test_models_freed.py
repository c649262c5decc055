"""Nothing keeps a model alive after its `fit`: sweeps and cross-validation train many."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
from support import small  # noqa: E402

import keras_distplug as kd  # noqa: E402


def test_freed(tmp_path: Path) -> None:
    """Neither callbacks of `defaults()` nor TensorFlow's traced steps keep the model."""
    models = []
    for number in range(2):
        model = small.model()
        callbacks = kd.defaults(tmp_path / str(number))
        model.fit(small.dataset(), verbose=0, callbacks=callbacks)
        models.append(weakref.ref(model))
        del model, callbacks
    keras.backend.clear_session()
    gc.collect()
    assert [model() for model in models] == [None, None]
