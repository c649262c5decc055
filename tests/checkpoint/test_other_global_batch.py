"""A run that continues with another global batch size."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(300)]

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from support import small  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.checkpoint import saver  # noqa: E402
from keras_distplug.core.errors import OtherRunError  # noqa: E402

IDS = np.arange(53, dtype="float32")[:, None]


class Noting(keras.layers.Layer):
    """Records the ids of the samples that its model is trained on, batch by batch."""

    def __init__(self) -> None:
        super().__init__()
        # Not a state of the layer, which a resumed run would restore.
        self.seen: Any = collections.UserList()

    def call(self, x: Any, training: bool = False) -> Any:
        if not training:
            return x
        noted = tf.py_function(
            lambda x: self.seen.append(x.numpy()[:, 0].astype(int).tolist()), [x], []
        )
        with tf.control_dependencies([noted]):
            return tf.identity(x)


class Stop(small.Watching):
    """Interrupts `fit` after a number of batches; knows the number of batches at the last
    checkpoint."""

    def __init__(self, noting: Noting, behind: int | None) -> None:
        super().__init__()
        self.noting = noting
        self.behind = math.inf if behind is None else behind
        self.saved = 0
        self.last: dict[int, int] = {}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.saved = len(self.noting.seen)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.last[self.epoch] = batch
        if len(self.noting.seen) > self.behind:
            raise small.Interrupted


def run(
    folder: Path, arguments: dict[str, Any], stop: int | None = None, at_once: int = 1, **ours: Any
) -> tuple[list[int], keras.callbacks.History | None, Stop]:
    """Trains for three epochs. Returns the samples up to the last checkpoint, if it is
    interrupted."""
    keras.utils.set_random_seed(11)
    arguments = dict(arguments)
    noting = Noting()
    model = keras.Sequential([keras.Input((1,)), noting, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-4), "mse", steps_per_execution=at_once)
    stopping, history = Stop(noting, stop), None
    ours = {"save_freq": 1, "allow_batch_change": True} | ours
    backup = kd.BackupAndRestore(folder, delete_checkpoint=False, on_busy="wait", **ours)
    fit = model.fit
    if not arguments.pop("plain", False):
        fit = lambda **given: kd.distributed_fit(model, **given, strategy="one_device")  # noqa: E731
    try:
        history = fit(**arguments, epochs=3, verbose=0, callbacks=[backup, stopping])
    except small.Interrupted:
        del noting.seen[stopping.saved :]
    saver.wait_for_all()
    return [sample for batch in noting.seen for sample in batch], history, stopping


def shuffled(size: int, more: Callable[[Any], Any] = lambda dataset: dataset) -> tf.data.Dataset:
    keras.utils.set_random_seed(11)
    dataset = tf.data.Dataset.from_tensor_slices((IDS, IDS)).shuffle(20, seed=1)
    return more(dataset.map(doubled)).batch(size).map(halved)


def doubled(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return x, 2 * y


def halved(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return x, y / 2


def of_unknown_length(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return dataset.filter(lambda x, y: True)


WAYS: dict[str, tuple[Callable[[int], dict[str, Any]], int, tuple[int, int, int]]] = {
    "arrays": (lambda size: {"x": IDS, "y": IDS, "batch_size": size}, 1, (8, 5, 3)),
    "arrays of Keras": (
        lambda size: {"x": IDS, "y": IDS, "batch_size": size, "plain": True},
        1,
        (3, 8, 5),
    ),
    "tf.data": (lambda size: {"x": shuffled(size)}, 1, (4, 16, 4)),
    "executions of 3 steps": (lambda size: {"x": shuffled(size)}, 3, (2, 3, 8)),
    "unknown length": (lambda size: {"x": shuffled(size, of_unknown_length)}, 1, (8, 5, 3)),
    "endless": (
        lambda size: {"x": shuffled(size, tf.data.Dataset.repeat), "steps_per_epoch": 5},
        1,
        (4, 16, 4),
    ),
    "some steps": (lambda size: {"x": shuffled(size), "steps_per_epoch": 20 // size}, 1, (8, 5, 3)),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_sample_keeps_its_place(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After interruptions mid-epoch, with another global batch size after the first and the last of
    them, no sample comes twice, none is skipped, their order is that of an uninterrupted run, and
    epochs end with their data."""
    make, at_once, (first, second, third) = WAYS[way]
    sizes = (first, second, second, third)
    expected, *_ = run(tmp_path / "whole", make(sizes[0]), at_once=at_once)
    found = []
    for size, stop in zip(sizes, (2, 1, 2, None), strict=True):
        behind = stop and stop * at_once
        samples, history, stopping = run(tmp_path / "changed", make(size), behind, at_once)
        found += samples
    assert history is not None
    assert history.epoch == [0, 1, 2]
    assert f"the global batch size has changed from {second} to {third}" in caplog.text
    shorter = min(len(found), len(expected))
    assert found[:shorter] == expected[:shorter]
    if "steps_per_epoch" not in make(1):
        assert len(found) == len(expected) == 3 * len(IDS)
        executions = math.ceil(math.ceil(len(IDS) / third) / at_once)
        assert stopping.last[2] < executions * at_once


MOVED = {
    "repeat": lambda dataset: dataset.repeat(1),
    "shuffle": lambda dataset: dataset.shuffle(2, seed=3),
    "take": lambda dataset: dataset.take(6),
}


@pytest.mark.parametrize("title", MOVED)
def test_moved_batches(title: str, tmp_path: Path) -> None:
    """If a transformation moves whole batches, another global batch size is refused mid-epoch, with
    the transformation's name, and accepted between epochs."""
    make = lambda size: {"x": MOVED[title](shuffled(size))}  # noqa: E731
    run(tmp_path / "within", make(8), 2)
    with pytest.raises(
        OtherRunError, match=f"samples cannot be skipped in the result of `{title}`"
    ):
        run(tmp_path / "within", make(4))
    _, history, _ = run(tmp_path / "between", make(8), 9, save_freq="epoch")
    assert history is None
    *_, stopping = run(tmp_path / "between", make(4), save_freq="epoch")
    assert list(stopping.last) == [1, 2]


def test_not_allowed(tmp_path: Path) -> None:
    """Another size is refused without the argument that allows it, which the error names."""
    run(tmp_path, WAYS["arrays"][0](8), 2)
    with pytest.raises(
        OtherRunError, match=r"was 8 at the checkpoint and is now 4.*allow_batch_change=True"
    ):
        run(tmp_path, WAYS["arrays"][0](4), allow_batch_change=False)


def test_batches_of_user_code(tmp_path: Path) -> None:
    """A `PyDataset` whose number of batches has changed is different data."""

    class Batches(keras.utils.PyDataset):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.size = size

        def __len__(self) -> int:
            return len(IDS) // self.size

        def __getitem__(self, index: int) -> Any:
            return (IDS[self.size * index :][: self.size],) * 2

    run(tmp_path, {"x": Batches(8)}, 2)
    with pytest.raises(OtherRunError, match="`batches` was 6 at the checkpoint and is now 13"):
        run(tmp_path, {"x": Batches(4)})
