"""Features that `fit` still lacks, and the private parts that replace them."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
import numpy as np  # noqa: E402
from support import small  # noqa: E402

from keras_distplug.backend.tensorflow.input import epochs  # noqa: E402
from keras_distplug.backend.tensorflow.replicas import replica_values  # noqa: E402


class Within(keras.callbacks.Callback):
    """Calls a function in `on_train_begin`, and records the batches."""

    def __init__(self, call: Any = lambda loop: None) -> None:
        super().__init__()
        self.call = call
        self.seen: list[int] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.loop = epochs.get_loop()
        assert self.loop is not None
        replica_values.build(self.model, self.loop.dataset.element_spec)
        self.call(self.loop)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(batch)


def fit(callback: Within, **arguments: Any) -> keras.callbacks.History:
    return small.model().fit(
        small.X, small.Y, batch_size=8, shuffle=False, verbose=0, callbacks=[callback], **arguments
    )


def test_upstream() -> None:
    """Once `fit` can start within an epoch, `Loop.begin_at` can be removed."""
    arguments = inspect.signature(keras.Model.fit).parameters
    assert "initial_epoch" in arguments
    assert not {"initial_step", "initial_batch", "initial_steps"} & arguments.keys()
    assert not hasattr(keras.callbacks.Callback(), "epoch_iterator")


def test_innermost_loop_is_found() -> None:
    """The loop of the innermost `fit` is found, and none outside a `fit`."""
    outer = Within()
    inner = Within(lambda loop: fit(outer))
    fit(inner)
    assert outer.loop.adapter is not inner.loop.adapter
    assert epochs.get_loop() is None


@pytest.mark.parametrize(("batch", "first"), [(0, [0, 1, 2, 3]), (3, [3]), (4, []), (math.inf, [])])
def test_start_at_batch(batch: float, first: list[int]) -> None:
    """The first epoch starts with that batch, the next one with its first batch."""
    callback = Within(lambda loop: loop.begin_at(batch))
    fit(callback, epochs=2)
    assert callback.seen == [*first, 0, 1, 2, 3]


def test_logs_of_an_epoch_without_batches() -> None:
    """An epoch that has no batch left gets the given logs, once."""
    undo = []

    def begin(callback: Within) -> Any:
        def call(loop: epochs.Loop) -> None:
            loop.begin_at(small.BATCHES)
            undo.append(epochs.begin_with_logs(callback.model, {"mine": 0.5}))

        return call

    callback = Within()
    callback.call = begin(callback)
    history = fit(callback, epochs=1)
    assert history.history == {"mine": [0.5]}
    undo[0]()
    assert callback.model._get_metrics_result_or_logs({"x": np.float32(1)}) == {"x": 1}
