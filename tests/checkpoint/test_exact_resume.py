"""Training that is interrupted at any point ends bit for bit like an uninterrupted one."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(600)]  # every case trains five times

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from support import small  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.backend.tensorflow.runtime import context  # noqa: E402
from keras_distplug.checkpoint import saver  # noqa: E402
from keras_distplug.core.errors import ConfigurationError, OtherRunError  # noqa: E402

EPOCHS = 4
BATCHES = 7


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Pipelines made before a model draw the same seeds, too."""
    keras.utils.set_random_seed(11)


def rows() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    x = generator.normal(size=(8 * BATCHES - 3, 6)).astype("float32")
    return x, (x.sum(axis=1) > 0).astype("float32")[:, None]


def model() -> keras.Model:
    keras.utils.set_random_seed(11)
    random.seed(12)
    made = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.GaussianNoise(0.1),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.9)
    made.compile(
        keras.optimizers.Adam(rate, use_ema=True, ema_overwrite_frequency=3),
        "binary_crossentropy",
        metrics=["accuracy", keras.metrics.AUC(num_thresholds=10, name="auc")],
    )
    return made


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return tuple(part[8 * index : 8 * index + 8] for part in rows())  # type: ignore[return-value]


def generated() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    x, y = rows()
    order = np.random.default_rng(4)
    while True:
        chosen = order.integers(len(x), size=8)
        yield x[chosen], y[chosen]


def shuffled() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(rows()).shuffle(40, seed=1).batch(8)


def augmented() -> tf.data.Dataset:
    seeds = tf.data.Dataset.random(seed=4, rerandomize_each_iteration=True).batch(2)
    return (
        tf.data.Dataset.zip(tf.data.Dataset.from_tensor_slices(rows()), seeds)
        .shuffle(20, seed=2)
        .map(
            lambda xy, seed: (xy[0] + tf.random.stateless_normal([6], seed), xy[1]),
            num_parallel_calls=2,
        )
        .batch(8)
        .prefetch(2)
    )


def of_unknown_length() -> tf.data.Dataset:
    return shuffled().filter(lambda x, y: True)


DATA: dict[str, Callable[[], dict[str, Any]]] = {
    "tf.data": lambda: {"x": shuffled()},
    "augmented": lambda: {"x": augmented()},
    "unknown length": lambda: {"x": of_unknown_length()},
    "arrays": lambda: dict(zip("xy", rows(), strict=True)) | {"batch_size": 8, "shuffle": True},
    "PyDataset": lambda: {"x": Batches(), "shuffle": True},
    "class weights": lambda: {"x": shuffled(), "class_weight": {0: 1.0, 1: 3.0}},
    "endless": lambda: {"x": shuffled().repeat(), "steps_per_epoch": 5},
    "repeated": lambda: {"x": shuffled().repeat(EPOCHS), "steps_per_epoch": 5},
    "some steps": lambda: {"x": shuffled(), "steps_per_epoch": 5},
    "generator": lambda: {"x": generated(), "steps_per_epoch": 5},
}


class Watch(keras.callbacks.Callback):
    """Records every batch and its logs, and interrupts training once."""

    def __init__(self, at: tuple[Any, ...] = ()) -> None:
        super().__init__()
        self.at = at
        self.seen: list[Any] = []
        self.drawn: list[float] = []
        self.epoch = -1

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = list(state["drawn"])

    def _interrupt(self, *now: Any) -> None:
        if now == self.at:
            raise small.Interrupted

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch
        self.drawn.append(random.random() + np.random.random())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append((self.epoch, batch, logs))
        self.drawn.append(random.random() + np.random.random())
        self._interrupt("batch", self.epoch, batch)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._interrupt("validation", self.epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append((self.epoch, logs))
        self._interrupt("epoch", self.epoch)


@dataclass(frozen=True)
class Case:
    data: str
    strategy: str = "plain"
    steps_per_execution: int = 1

    def __str__(self) -> str:
        return f"{self.data}-{self.strategy}-{self.steps_per_execution}"


def fit(case: Case, folder: Path, at: tuple[Any, ...] = ()) -> tuple[list[Any], Watch]:
    watch = Watch(at)
    made = model()
    made.steps_per_execution = case.steps_per_execution
    stopping = keras.callbacks.EarlyStopping(
        "val_loss", patience=3, restore_best_weights=True, verbose=0
    )
    backup = kd.BackupAndRestore(folder, save_freq=1, delete_checkpoint=False, on_busy="wait")
    arguments = DATA[case.data]() | {
        "epochs": EPOCHS,
        "verbose": 0,
        "validation_data": shuffled().take(3),
        "callbacks": [backup, watch, stopping],
    }
    if case.strategy == "plain":
        history = made.fit(**arguments)
    else:
        history = kd.distributed_fit(made, **arguments, strategy=case.strategy)
    return [
        small.state(made),
        history.history,
        history.epoch,
        # A generator is read again, and repeats its draws from Python's generators.
        [] if case.data == "generator" else watch.drawn,
        (stopping.wait, stopping.best, stopping.best_epoch),
        [w.tobytes() for w in map(np.asarray, stopping.best_weights or [])],
    ], watch


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Any]:
    @cache
    def of(case: Case) -> Any:
        return fit(case, tmp_path_factory.mktemp("whole"))

    return of


MOMENTS = [("batch", 0, 0), ("validation", 1), ("batch", 2, "last")]
CASES = [
    *(Case(data) for data in DATA if data not in ("arrays", "class weights", "repeated")),
    Case("unknown length", steps_per_execution=3),
    Case("arrays", "one_device"),
    Case("unknown length", "mirrored", 3),
    Case("tf.data", "central_storage"),
]
# Other combinations of the above, which take a minute or two per case.
MORE = [
    Case("class weights"),
    Case("repeated"),
    Case("tf.data", steps_per_execution=3),
    Case("endless", steps_per_execution=2),
    *(Case(data, "one_device") for data in ("tf.data", "endless", "PyDataset")),
    # `tests/scenarios/test_killed_at_random.py` kills "tf.data" under a strategy.
    *(Case(data, "mirrored") for data in ("tf.data", "arrays", "endless", "PyDataset")),
]


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.soak) for case in MORE)], ids=str
)
def test_interrupted(case: Case, uninterrupted: Any, tmp_path: Path) -> None:
    """Interrupted after the first batch, within an epoch, after the last batch of one, during
    validation, and between epochs, a run ends with the same weights, optimizer, History, callback
    states and random states as an uninterrupted one; every batch is seen once, under its own
    number."""
    expected, whole = uninterrupted(case)
    last = max(seen[1] for seen in whole.seen if len(seen) == 3)
    for moment in MOMENTS:
        at = tuple(last if part == "last" else part for part in moment)
        if at[0] == "batch" and case.steps_per_execution > 1:
            at = (*at[:2], next(s[1] for s in whole.seen if len(s) == 3 and s[1] >= at[2]))
        with pytest.raises(small.Interrupted):
            fit(case, tmp_path, at)
        saver.wait_for_all()
    found, watch = fit(case, tmp_path)
    assert found == expected
    assert watch.seen == whole.seen[-len(watch.seen) :]


def without_dropout(optimizer: str = "adam", *, more: bool = False) -> keras.Model:
    keras.utils.set_random_seed(11)
    layers = [keras.Input((6,)), keras.layers.Dense(8, activation="relu")]
    layers += [keras.layers.Activation("tanh")] if more else []
    made = keras.Sequential([*layers, keras.layers.Dense(1, activation="sigmoid")])
    made.compile(optimizer, "binary_crossentropy", metrics=["accuracy"])
    return made


def train(
    folder: Path, data: Any, at: tuple[Any, ...] = (), made: Any = without_dropout, **arguments: Any
) -> tuple[keras.Model, keras.callbacks.History, Watch]:
    watch = Watch(at)
    allow = {"allow_data_change": arguments.pop("allow_data_change", False)}
    backup = kd.BackupAndRestore(
        folder, save_freq=1, delete_checkpoint=False, on_busy="wait", **allow
    )
    history = kd.distributed_fit(
        made(), data, epochs=3, verbose=0, callbacks=[backup, watch], **arguments
    )
    saver.wait_for_all()
    return history.model, history, watch


def interrupt(folder: Path, data: Any, at: tuple[Any, ...], **arguments: Any) -> None:
    with pytest.raises(small.Interrupted):
        train(folder, data, at, **arguments)
    saver.wait_for_all()


def test_other_number_of_replicas(tmp_path: Path) -> None:
    """A run that changes from one replica to two and back mid-epoch sees the same batches, none
    twice, none skipped, and ends like an uninterrupted one except for rounding, including the
    metrics of the epoch."""
    expected, history, whole = train(tmp_path / "a", shuffled(), strategy="one_device")
    interrupt(tmp_path / "b", shuffled(), ("batch", 0, 3), strategy="one_device")
    interrupt(tmp_path / "b", shuffled(), ("batch", 1, 4), strategy="mirrored")
    found, resumed, watch = train(tmp_path / "b", shuffled(), strategy="one_device")
    assert watch.seen[0][:2] == (1, 4)
    assert len(watch.seen) == len(whole.seen) - 11 - 1
    for a, b in zip(found.weights, expected.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-6)
    for name, values in history.history.items():
        np.testing.assert_allclose(resumed.history[name], values, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (
            {"data": lambda: shuffled().unbatch().batch(4)},
            "`batch_size` was 8 at the checkpoint and is now 4",
        ),
        (
            {"data": lambda: shuffled().map(lambda x, y: (x, y))},
            "at the checkpoint and is now 'map",
        ),
        (
            {"made": lambda: without_dropout("adamw")},
            "`optimizer` was 'Adam' at the checkpoint and is now 'AdamW'",
        ),
        (
            {"made": lambda: without_dropout(more=True)},
            "was 'Dense' at the checkpoint and is now 'Activation'",
        ),
    ],
    ids=["batch", "pipeline", "optimizer", "layers"],
)
def test_other_training(change: dict[str, Any], difference: str, tmp_path: Path) -> None:
    """Another global batch, pipeline, optimizer or model is refused before a step, with the first
    difference, and nothing is changed."""
    interrupt(tmp_path, shuffled(), ("batch", 1, 2))
    before = {path: path.read_bytes() for path in tmp_path.glob("run-*/**/*") if path.is_file()}
    data = change.get("data", shuffled)()
    with pytest.raises(OtherRunError, match=re.escape(difference)):
        train(tmp_path, data, made=change.get("made", without_dropout))
    assert {
        path: path.read_bytes() for path in tmp_path.glob("run-*/**/*") if path.is_file()
    } == before


def test_other_data_on_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With `allow_data_change`, the epoch starts again with the new data."""
    interrupt(tmp_path, shuffled(), ("batch", 1, 2))
    data = shuffled().unbatch().batch(4)
    _, history, watch = train(tmp_path, data, allow_data_change=True)
    assert watch.seen[0][:2] == (1, 0)
    assert history.epoch == [0, 1, 2]
    assert "because the data has changed" in caplog.text


def test_same_data_read_again(tmp_path: Path) -> None:
    """A notebook's cell that is run again with a dataset already read behaves as in a new
    process."""
    data = shuffled()
    expected, *_ = train(tmp_path / "a", shuffled())
    interrupt(tmp_path / "b", data, ("batch", 1, 2))
    found, *_ = train(tmp_path / "b", data)
    assert small.state(found) == small.state(expected)


def test_unseeded_shuffle(tmp_path: Path) -> None:
    """A shuffle without a seed gets the run's."""

    def unseeded() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(rows()).shuffle(40).batch(8)

    expected, *_ = train(tmp_path / "a", unseeded)
    interrupt(tmp_path / "b", unseeded, ("batch", 1, 2))
    found, *_ = train(tmp_path / "b", unseeded)
    assert small.state(found) == small.state(expected)


def test_deterministic_without_a_seed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`deterministic=True` is refused if nothing has a seed."""
    monkeypatch.setattr(context, "global_seed", lambda: None)
    with pytest.raises(ConfigurationError, match="set_random_seed"):
        kd.distributed_fit(without_dropout(), shuffled(), directory=tmp_path, deterministic=True)
    assert not list(tmp_path.iterdir())


def test_irreproducible_parts(tmp_path: Path) -> None:
    """A plain `fit` names the parts of its data that cannot be reproduced, and what to write
    instead."""
    noisy = shuffled().map(lambda x, y: (x + tf.random.uniform(tf.shape(x), seed=1), y), 2)
    backup = kd.BackupAndRestore(tmp_path)
    with pytest.warns(UserWarning, match=r"map .*: RandomUniform runs in parallel.*Remove"):
        without_dropout().fit(noisy, verbose=0, shuffle=False, callbacks=[backup])


@pytest.mark.parametrize(("before", "now"), [(["accuracy"], []), ([], ["accuracy"])])
def test_other_metrics(
    before: list[str], now: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With other metrics, the model continues, and the epoch's metrics start from scratch."""

    def measured(metrics: list[str]) -> keras.Model:
        made = without_dropout()
        made.compile(made.optimizer, "binary_crossentropy", metrics=metrics)
        return made

    interrupt(tmp_path, shuffled, ("batch", 1, 2), made=lambda: measured(before))
    _, history, watch = train(tmp_path, shuffled, made=lambda: measured(now))
    assert watch.seen[0][:2] == (1, 2)
    assert "metrics of this epoch do not cover the batches before" in caplog.text
    assert history.epoch == [0, 1, 2]
