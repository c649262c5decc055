from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.compat import trainer  # noqa: E402


@pytest.fixture(autouse=True)
def stock() -> Iterator[None]:
    trainer.remove_dispatch()
    yield
    trainer.remove_dispatch()


def model() -> keras.Model:
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made


def test_dispatch_is_installed_on_first_use_and_removable() -> None:
    """Importing the package leaves Keras alone; `defaults()` installs the dispatch, once."""
    method = TensorFlowTrainer._maybe_symbolic_build
    kd.defaults("unused")
    dispatch = TensorFlowTrainer._maybe_symbolic_build
    assert dispatch is not method
    kd.defaults("unused")
    assert TensorFlowTrainer._maybe_symbolic_build is dispatch
    trainer.remove_dispatch()
    assert TensorFlowTrainer._maybe_symbolic_build is method
    trainer.remove_dispatch()
    assert TensorFlowTrainer._maybe_symbolic_build is method


def test_dispatch_leaves_other_models_alone() -> None:
    """A model that is not under MultiWorkerMirroredStrategy trains as Keras has it."""
    trainer.install_dispatch()
    mine = model()
    mine.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    assert not trainer.is_adapted(mine)


def test_adapt_one_replica() -> None:
    """A model of one replica needs nothing and gets nothing."""
    mine = model()
    assert kd.adapt(mine) is mine
    assert not trainer.is_adapted(mine)
