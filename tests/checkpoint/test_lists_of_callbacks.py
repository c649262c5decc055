"""Incorrect lists of callbacks, and loops other than Keras' `fit`."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
from support import small  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.core.errors import ConfigurationError  # noqa: E402


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (lambda a, b: [*kd.defaults(a), *kd.defaults(b)], "Expected one `defaults()` among"),
        (lambda a, b: [kd.defaults(a), [kd.defaults(b)]], "Expected one `defaults()` among"),
        (lambda a, b: [kd.BackupAndRestore], "Received: the class BackupAndRestore itself. Write"),
        (lambda a, b: [*kd.defaults(a), keras.callbacks.TerminateOnNaN], "the class Terminate"),
        (lambda a, b: kd.defaults, "Received: the function `defaults` itself"),
        (lambda a, b: [kd.defaults], "Received: the function `defaults` itself"),
    ],
)
def test_invalid_lists(callbacks: Any, message: str, tmp_path: Path) -> None:
    """Errors in the list of callbacks are reported, with the correct code."""
    given = callbacks(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        small.model().fit(small.X, small.Y, verbose=0, callbacks=given)


def test_ready_made_list(tmp_path: Path) -> None:
    model = small.model()
    made = keras.callbacks.CallbackList(kd.defaults(tmp_path), add_history=True, model=model)
    for fit in (model.fit, functools.partial(kd.distributed_fit, model)):
        with pytest.raises(ConfigurationError, match=r"`callbacks` to be a list\. Received: a"):
            fit(small.X, small.Y, verbose=0, callbacks=made)


def test_custom_loop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The duties of a loop over `train_on_batch` are reported when it starts."""
    model = small.model()
    made = keras.callbacks.CallbackList(
        kd.defaults(tmp_path, save_freq=1), add_history=True, model=model, epochs=1, steps=4
    )
    made.on_train_begin()
    assert "but the loop itself must skip the batches" in caplog.text
    made.on_epoch_begin(0)
    for batch in range(4):
        made.on_train_batch_begin(batch)
        logs = model.train_on_batch(small.X[:8], small.Y[:8], return_dict=True)
        made.on_train_batch_end(batch, logs)
    made.on_epoch_end(0, logs)
    made.on_train_end(logs)
    assert int(model.optimizer.iterations) == 4
