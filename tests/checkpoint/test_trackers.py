"""Callbacks of experiment trackers next to ours: they change nothing, and their counters
continue."""

from __future__ import annotations

import gc
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
from support import small  # noqa: E402
from support.curves import curves_in  # noqa: E402

import keras_distplug as kd  # noqa: E402

Callback = keras.callbacks.Callback
EPOCHS = 3


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Trackers set variables, which processes that later tests start would inherit."""
    with mock.patch.dict(os.environ):
        yield


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
    stop = StopFlushed(first, 1, 1)
    with pytest.raises(small.Interrupted):
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


def tqdm_bars(folder: Path) -> Callback:
    module = pytest.importorskip("tqdm.keras", reason="pip install tqdm")
    return module.TqdmCallback(verbose=2, file=io.StringIO())


def wandb_metrics(folder: Path) -> Callback:
    wandb = pytest.importorskip("wandb", reason="pip install wandb")
    settings = wandb.Settings(console="off")
    wandb.init(project="p", id="a", dir=str(folder), mode="offline", settings=settings)
    from wandb.integration.keras import WandbMetricsLogger

    return WandbMetricsLogger(log_freq="batch")


def mlflow_metrics(folder: Path) -> Callback:
    mlflow = pytest.importorskip("mlflow", reason="pip install mlflow")
    for package in ("pandas", "alembic"):  # which mlflow-skinny does not bring
        pytest.importorskip(package, reason=f"pip install {package}")
    from mlflow.keras import MlflowCallback

    mlflow.end_run()
    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    if mlflow.get_experiment_by_name("a") is None:
        mlflow.create_experiment("a", artifact_location=str(folder / "artifacts"))
    mlflow.set_experiment("a")
    mlflow.start_run()
    return MlflowCallback(log_every_epoch=False, log_every_n_steps=1)


def live_plot(folder: Path) -> Callback:
    pytest.importorskip("livelossplot", reason="pip install livelossplot")
    from livelossplot.inputs.keras import PlotLossesCallback
    from livelossplot.outputs import ExtremaPrinter

    return PlotLossesCallback(outputs=[ExtremaPrinter()])


TRACKERS: dict[str, Callable[[Path], Callback]] = {
    "tqdm": tqdm_bars,
    "wandb": wandb_metrics,
    "mlflow": mlflow_metrics,
    "livelossplot": live_plot,
}
# Counters that continue.
COUNTERS: dict[str, Callable[[Any], Any]] = {
    "tqdm": lambda callback: (callback.batch_bar.n, callback.epoch_bar.n),
    "wandb": lambda callback: callback.global_batch,
}


@pytest.mark.parametrize("ours_first", [True, False], ids=["ours first", "theirs first"])
@pytest.mark.parametrize("name", TRACKERS)
def test_tracker(
    name: str, ours_first: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The weights are those of a training without any callback, no message mentions the tracker,
    and its counters end where those of an uninterrupted training end."""
    whole = TRACKERS[name](tmp_path)
    plain = fit([whole], [])
    stopped = [TRACKERS[name](tmp_path), small.Stop(1, 1)]
    with pytest.raises(small.Interrupted):
        fit(stopped, [backup(tmp_path / "runs")], ours_first=ours_first)
    resumed = TRACKERS[name](tmp_path)
    assert fit([resumed], [backup(tmp_path / "runs")], ours_first=ours_first) == plain
    assert "resuming at epoch" in caplog.text
    assert not [each for each in caplog.messages if "cannot" in each]
    if name in COUNTERS:
        assert COUNTERS[name](resumed) == COUNTERS[name](whole)
