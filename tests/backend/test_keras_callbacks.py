"""The state of Keras' callbacks."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402

from keras_distplug.backend.tensorflow.runtime import keras_callbacks  # noqa: E402


def test_upstream() -> None:
    """keras-team/keras#14862: callbacks have no API for their state. When this fails, use it."""
    for name in ("state_dict", "get_state", "get_config"):
        assert not hasattr(keras.callbacks.EarlyStopping, name)


@pytest.mark.parametrize(
    ("callback", "known"),
    [
        (keras.callbacks.EarlyStopping(), {"wait", "stopped_epoch", "best", "best_epoch"}),
        (keras.callbacks.ReduceLROnPlateau(), {"wait", "cooldown_counter", "best"}),
        (
            keras.callbacks.ModelCheckpoint("a.keras"),
            {"best", "_batches_seen_since_last_saving", "_last_batch_seen"},
        ),
        (keras.callbacks.SwapEMAWeights(), {"_ema_weights_in_model"}),
        (keras.callbacks.TensorBoard(), {"_global_train_batch", "_global_test_batch"}),
        (keras.callbacks.CSVLogger("a.csv"), {"bytes_of_rows"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_state(callback: keras.callbacks.Callback, known: set[str]) -> None:
    """The attributes that influence further training exist in this version of Keras."""
    if isinstance(callback, keras.callbacks.EarlyStopping):
        callback.on_train_begin()
        known = known | {"best_weights"}
    assert (keras_callbacks.get_callback_state(callback) or {}).keys() == known


@pytest.mark.parametrize(
    "callback",
    [
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.LambdaCallback(),
        keras.callbacks.Callback(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_state(callback: keras.callbacks.Callback) -> None:
    """Callbacks whose past has no influence have no state."""
    assert keras_callbacks.get_callback_state(callback) is None
