"""Tests which run of a folder a `fit` continues: that of its model and data, never another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.one_process]

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from support import small  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.core.errors import OtherRunError  # noqa: E402

FOLDS = 3
Callbacks = list[keras.callbacks.Callback]


@pytest.fixture(autouse=True)
def new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["/somewhere/train.py"])
    small.start_process()
    yield
    small.start_process()


def dataset(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    return {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(8)}


def arrays(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    return {"x": x, "y": y, "batch_size": 8}


class OfArrays(keras.utils.PyDataset):
    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        super().__init__()
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x) // 5

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(5 * index, 5 * index + 5)
        return self.x[rows], self.y[rows]


INPUTS: dict[str, Callable[[np.ndarray, np.ndarray], dict[str, Any]]] = {
    "arrays": arrays,
    "tf.data": dataset,
    "PyDataset": lambda x, y: {"x": OfArrays(x, y)},
}


def fold(
    number: int, callbacks: Callbacks, kind: str = "arrays", epochs: int = 2, **given: Any
) -> list[bytes]:
    """Returns one fold of a k-fold validation; all folds have the same number of samples."""
    kept = np.arange(30) % FOLDS != number
    model = small.model()
    data = INPUTS[kind](small.X[kept], small.Y[kept])
    if given:
        kd.distributed_fit(model, **data, epochs=epochs, verbose=0, callbacks=callbacks, **given)
    else:
        model.fit(**data, epochs=epochs, verbose=0, callbacks=callbacks)
    return small.state(model)


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("folder", ["default", "given"])
def test_skipped_folds(folder: str, kind: str, tmp_path: Path) -> None:
    """A script that skips finished folds itself gets no other fold's weights: the interrupted fold
    is resumed, the ones after it are trained."""
    plain = [fold(number, [], kind) for number in range(FOLDS)]
    assert len(set(map(tuple, plain))) == FOLDS

    def callbacks() -> Callbacks:
        return kd.defaults(None if folder == "default" else "runs", save_freq=1, on_busy="wait")

    assert fold(0, callbacks(), kind) == plain[0]
    stop = small.Stop(1, 1)
    with pytest.raises(small.Interrupted):
        fold(1, [*callbacks(), stop], kind)
    small.start_process()
    count = small.Stop()
    assert fold(1, [*callbacks(), count], kind) == plain[1]
    assert 0 < count.batches < stop.batches
    assert fold(2, callbacks(), kind) == plain[2]
    small.start_process()
    nothing = small.Stop()  # and a restart that skips none repeats the sequence
    assert [fold(n, [*callbacks(), nothing], kind) for n in range(FOLDS)] == plain
    assert nothing.batches == 0


@pytest.mark.parametrize("kind", INPUTS)
def test_next_fold(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """A fold without a run starts one in the default folder, and is refused in a folder that was
    given for another fold."""
    plain = fold(1, [], kind)
    fold(0, kd.defaults(), kind)
    fold(0, kd.defaults("runs"), kind)
    small.start_process()
    caplog.clear()
    assert fold(1, kd.defaults(), kind) == plain
    assert "run-0001 belongs to a different model or different data; starting" in caplog.text
    with pytest.raises(OtherRunError, match=r"the values of .* have changed"):
        fold(1, kd.defaults("runs"), kind)


@pytest.mark.parametrize("folder", [None, "runs"], ids=["default", "given"])
def test_skipped_trials(folder: str | None) -> None:
    """Trials that differ in a hyperparameter find their own runs when earlier ones are skipped; a
    trial without a run does not get the finished run of another."""

    def trial(rate: float, dropout: float, *callbacks: keras.callbacks.Callback) -> list[bytes]:
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(4), keras.layers.Dropout(dropout), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile(keras.optimizers.Adam(rate), "mse")
        model.fit(
            small.X, small.Y, batch_size=8, epochs=2, verbose=0, callbacks=[*callbacks, decay]
        )
        return small.state(model)

    decay = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.1**epoch)

    def ours() -> Callbacks:
        return kd.defaults(folder, save_freq=1, on_busy="wait")

    # The first trial reaches the learning rate of the third one.
    trials = [(0.1, 0.5), (0.1, 0.2), (0.01, 0.5)]
    plain = [trial(*each) for each in trials]
    assert trial(*trials[0], *ours()) == plain[0]
    assert trial(*trials[1], *ours()) == plain[1]
    stop = small.Stop(1, 1)
    with pytest.raises(small.Interrupted):
        trial(*trials[2], *ours(), stop)
    small.start_process()
    count = small.Stop()
    assert trial(*trials[2], *ours(), count) == plain[2]
    assert 0 < count.batches < stop.batches
    small.start_process()
    assert trial(*trials[1], *ours(), nothing := small.Stop()) == plain[1]
    assert nothing.batches == 0
    small.start_process()
    with pytest.raises(OtherRunError, match=r"is finished, and was trained with .*rate` 0\.1\."):
        trial(0.3, 0.5, *ours())


def test_ambiguous() -> None:
    """An interrupted run of another training in the default folder is refused."""
    with pytest.raises(small.Interrupted):
        fold(0, [*kd.defaults(save_freq=1, on_busy="wait"), small.Stop(1, 1)])
    small.start_process()
    with pytest.raises(OtherRunError, match="the values of `x` and `y` have changed"):
        fold(1, kd.defaults())
    wide = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    wide.compile("adam", "mse")
    with pytest.raises(OtherRunError, match="run of another model"):
        wide.fit(small.X, small.Y, verbose=0, callbacks=kd.defaults())
    fold(1, kd.defaults(resume=False))
    small.start_process()
    count = small.Stop()
    plain = fold(0, [])  # the newer run does not hide it
    assert fold(0, [*kd.defaults(), count]) == plain
    assert 0 < count.batches < 6


@pytest.mark.parametrize("kind", ["arrays", "tf.data"])
@pytest.mark.parametrize("given", [{}, {"strategy": "one_device"}], ids=["fit", "distributed_fit"])
def test_other_data(given: dict[str, Any], kind: str) -> None:
    """Other samples, and other labels, are refused, both mid-run and for a finished run; the
    suggested argument allows them."""

    def go(x: np.ndarray, y: np.ndarray, *more: Any, **named: Any) -> None:
        model, data = small.model(), INPUTS[kind](x, y)
        options = {"epochs": 2, "verbose": 0}
        if given:
            ours = [
                kd.BackupAndRestore("runs", 1, delete_checkpoint=False, on_busy="wait", **named),
                *more,
            ]
            kd.distributed_fit(model, **data, callbacks=ours, **options, **given)
        else:
            ours = [*kd.defaults("runs", save_freq=1, on_busy="wait", **named), *more]
            model.fit(**data, callbacks=ours, **options)

    with pytest.raises(small.Interrupted):
        go(small.X, small.Y, small.Stop(1, 1))
    labels = small.Y[::-1].copy()
    for x, y in ((small.X * 2, small.Y), (small.X, labels)):
        with pytest.raises(OtherRunError, match=r"have changed\. Undo .*allow_data_change=True"):
            go(x, y)
    with pytest.raises(OtherRunError, match=r"`.*` was .*30.* at the checkpoint and is now .*29"):
        go(small.X[:-1], small.Y[:-1])
    go(small.X, small.Y)
    small.start_process()
    with pytest.raises(OtherRunError, match=r"allow_data_change=True to get the finished"):
        go(small.X, labels)
    go(small.X, labels, allow_data_change=True)


def test_other_order(caplog: pytest.LogCaptureFixture) -> None:
    """The same samples in another order are not different data, but the change is reported."""
    with pytest.raises(small.Interrupted):
        small.model().fit(
            small.X, small.Y, batch_size=8, verbose=0,
            callbacks=[*kd.defaults("runs", save_freq=1, on_busy="wait"), small.Stop(0, 2)],
        )  # fmt: skip
    back = slice(None, None, -1)
    caplog.clear()
    small.model().fit(
        small.X[back], small.Y[back], batch_size=8, verbose=0, callbacks=kd.defaults("runs")
    )
    assert "the samples are in a different order than at the checkpoint" in caplog.text


def test_data_that_changes(caplog: pytest.LogCaptureFixture) -> None:
    """Data changed by reading it is not refused, but the change is reported."""

    class Counting(OfArrays):
        def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
            self.x[0] += 0  # Keras reads before training, too
            self.seen = getattr(self, "seen", np.zeros(4)) + offset
            return super().__getitem__(index)

    for offset, stop in ((1, small.Stop(0, 3)), (2, small.Stop())):  # noqa: B007
        data = Counting(small.X.copy(), small.Y)
        try:
            callbacks = [*kd.defaults("runs", save_freq=1, on_busy="wait"), stop]
            small.model().fit(data, epochs=1, verbose=0, shuffle=False, callbacks=callbacks)
        except small.Interrupted:
            caplog.clear()
    assert "the values of the samples have changed since the checkpoint" in caplog.text


def test_tasks_of_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task of an array has its own default folder."""
    for task in range(2):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(task))
        fold(task, kd.defaults())
    found = sorted(each.name for each in Path("keras_distplug_runs").iterdir())
    assert found == ["train-task-0", "train-task-1"]


def test_seed_set_once() -> None:
    """A seed set at only one of two starts decides who shuffles arrays: it is reported mid-run, and
    makes no difference to a finished run."""

    def go(*more: keras.callbacks.Callback) -> None:
        made = small.model()
        tf.random.set_seed(None)
        callbacks = [*kd.defaults("runs", save_freq=1, on_busy="wait"), *more]
        made.fit(small.X, small.Y, batch_size=8, verbose=0, callbacks=callbacks)

    with pytest.raises(small.Interrupted):
        fold_of_all(small.Stop(0, 2))
    with pytest.raises(OtherRunError, match="set_random_seed` was called when the run started"):
        go()
    fold_of_all()
    small.start_process()
    go()


def fold_of_all(*more: keras.callbacks.Callback) -> None:
    callbacks = [*kd.defaults("runs", save_freq=1, on_busy="wait"), *more]
    small.model().fit(small.X, small.Y, batch_size=8, verbose=0, callbacks=callbacks)


def test_loaded_model() -> None:
    """A model loaded by Keras from a file has other paths, but is the same model (the idiom
    `make_or_restore_model` of Keras' guide)."""
    plain = small.model()
    plain.fit(small.X, small.Y, batch_size=8, epochs=3, verbose=0)
    callbacks = kd.defaults("runs", save_freq=1, on_busy="wait")
    saving = keras.callbacks.ModelCheckpoint("{epoch}.keras")
    with pytest.raises(small.Interrupted):
        small.model().fit(
            small.X, small.Y, batch_size=8, epochs=3, verbose=0,
            callbacks=[*callbacks, saving, small.Stop(1, 2)],
        )  # fmt: skip
    keras.utils.set_random_seed(5)
    model = keras.saving.load_model("1.keras")
    assert model.weights[0].path != plain.weights[0].path
    callbacks = kd.defaults("runs", save_freq=1, on_busy="wait")
    model.fit(small.X, small.Y, batch_size=8, epochs=3, verbose=0, callbacks=[*callbacks, saving])
    for mine, its in zip(model.weights, plain.weights, strict=True):
        np.testing.assert_array_equal(mine, its)


class OwnOrder(keras.utils.PyDataset):
    """Shuffles its own samples, without a seed, as subclasses of Keras' `Sequence` often do."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__()
        self.ids = [f"sample-{each}" for each in ids]
        self.indexes = np.random.default_rng().permutation(len(ids))

    def __len__(self) -> int:
        return len(self.ids) // 5

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self.indexes[5 * index : 5 * index + 5]
        numbers = [int(self.ids[row].partition("-")[2]) for row in rows]
        return small.X[numbers], small.Y[numbers]


def test_own_order() -> None:
    """An order that the data draws itself in every process does not make it different data."""

    def go(fold: int, *more: keras.callbacks.Callback) -> None:
        data = OwnOrder([each for each in range(30) if each % FOLDS != fold])
        callbacks = [*kd.defaults(save_freq=1, on_busy="wait"), *more]
        small.model().fit(data, epochs=2, verbose=0, callbacks=callbacks)

    go(0)
    with pytest.raises(small.Interrupted):
        go(1, small.Stop(1, 1))
    small.start_process()
    first, second = small.Stop(), small.Stop()
    go(0, first)
    go(1, second)
    assert first.batches == 0
    assert 0 < second.batches < 8


def test_other_model_between() -> None:
    """An interrupted run that is neither this one nor the one expected here is not continued."""
    fold(0, kd.defaults())
    with pytest.raises(small.Interrupted):
        fold(1, [*kd.defaults(save_freq=1, on_busy="wait"), small.Stop(1, 1)])
    small.start_process()
    with pytest.raises(OtherRunError, match="is an interrupted run of a different model or"):
        fold(2, kd.defaults())
