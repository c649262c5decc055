"""TensorBoard with points for every batch next to ours, through an interruption."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
from support import small  # noqa: E402
from support.curves import curves_in  # noqa: E402

import keras_distplug as kd  # noqa: E402

Callback = keras.callbacks.Callback
EPOCHS = 3


class StopFlushed(small.Stop):
    """Interrupts training once TensorBoard's files are written, as after a while in a long run."""

    def __init__(self, tensorboard: keras.callbacks.TensorBoard, epoch: int, batch: int) -> None:
        super().__init__(epoch, batch)
        self.tensorboard = tensorboard

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        for writer in self.tensorboard._writers.values():
            writer.flush()
        super().on_train_batch_end(batch, logs)


def fit(theirs: list[Callback], ours: list[Callback], *, ours_first: bool = True) -> list[bytes]:
    model = small.model()
    callbacks = [*ours, *theirs] if ours_first else [*theirs, *ours]
    model.fit(small.X, small.Y, batch_size=8, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    return small.state(model)


def backup(directory: Path) -> Callback:
    return kd.BackupAndRestore(directory, save_freq=3, on_busy="wait", delete_checkpoint=False)


@pytest.mark.parametrize("ours_first", [True, False], ids=["ours first", "theirs first"])
def test_tensorboard_of_batches(ours_first: bool, tmp_path: Path) -> None:
    """TensorBoard with `update_freq="batch"` has one point for every batch and every epoch."""

    def board() -> keras.callbacks.TensorBoard:
        return keras.callbacks.TensorBoard(tmp_path / "logs", update_freq="batch")

    plain = fit([], [])
    first = board()
    with pytest.raises(small.Interrupted):
        stop = StopFlushed(first, 1, 1)
        fit([first, stop], [backup(tmp_path / "runs")], ours_first=ours_first)
    del first, stop
    gc.collect()
    before = curves_in(tmp_path / "logs", ["train"])["train"]["batch_loss"]
    assert max(step for step, _ in before) > 3  # these have no checkpoint yet
    assert fit([board()], [backup(tmp_path / "runs")], ours_first=ours_first) == plain
    train = curves_in(tmp_path / "logs", ["train"])["train"]
    steps = [step for step, _ in train["batch_loss"]]
    assert steps == list(range(1, EPOCHS * small.BATCHES + 1))
    assert [step for step, _ in train["epoch_loss"]] == list(range(EPOCHS))
