"""NaN during training, in one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from support import small  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.core.errors import ConfigurationError, NonFiniteError  # noqa: E402
from keras_distplug.nonfinite import incident_files  # noqa: E402
from keras_distplug.nonfinite.skipped_updates import ReplicaValues, SkippedUpdate, find_culprits  # noqa: E402
from keras_distplug.storage.files import open_files  # noqa: E402

BATCHES = 10


def data(nan_in: Sequence[int] = (), absent: Sequence[int] = ()) -> tf.data.Dataset:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCHES, 8, 4)).astype("float32")
    y = x[..., :1] * 2
    x[list(nan_in), 3] = np.nan
    x, y = (np.delete(each, list(absent), axis=0).reshape(-1, each.shape[-1]) for each in (x, y))
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(8)


def model(**compiled: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    made = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(6, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )
    made.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **compiled)
    return made


class Waits(keras.callbacks.Callback):
    """Waits for every save before the next batch, so that the set of checkpoints is
    deterministic."""

    def __init__(self, backup: kd.BackupAndRestore) -> None:
        super().__init__()
        self.backup = backup

    def on_train_batch_begin(self, batch, logs=None):
        for saves in self.backup._all_saves:
            saves.wait()


def trained(
    x: tf.data.Dataset,
    *callbacks: keras.callbacks.Callback,
    folder: Path | None = None,
    save_freq: Any = "epoch",
    epochs: int = 1,
    **compiled: Any,
) -> tuple[list[bytes], dict[str, list[float]]]:
    """Returns the bits of the state, and the History."""
    made = model(**compiled)
    if folder is not None:
        backup = kd.BackupAndRestore(folder, save_freq=save_freq, delete_checkpoint=False)
        callbacks = (backup, Waits(backup), *callbacks)
    history = made.fit(x, epochs=epochs, verbose=0, callbacks=list(callbacks)).history
    return small.state(made), history


class Reports(list[SkippedUpdate]):
    def watchdog(self, **arguments: Any) -> kd.NaNWatchdog:
        return kd.NaNWatchdog(on_fault=self.append, **arguments)

    @property
    def places(self) -> list[tuple[int, int | None, int]]:
        return [(each.epoch, each.batch, each.in_a_row) for each in self]


@pytest.mark.parametrize("steps", [1, 4])
def test_skips_are_reported(steps: int) -> None:
    """Every skipped update is reported with its batch and the number of consecutive skips, also in
    executions of several steps."""
    reports = Reports()
    bad = [1, 3, 4, 7, 8]
    found = trained(data(nan_in=bad), reports.watchdog(), epochs=2, steps_per_execution=steps)
    one_epoch = [(1, 1), (3, 1), (4, 2), (7, 1), (8, 2)]
    assert reports.places == [(epoch, *each) for epoch in range(2) for each in one_epoch]
    assert {each.culprits[0].replica for each in reports} == {0}
    assert found == trained(data(absent=bad), epochs=2)


class Twice(keras.Model):
    """Applies updates of one optimizer twice per step, as WGAN-GP does."""

    def __init__(self, spoils: int | None = None) -> None:
        super().__init__()
        self.dense, self.spoils = keras.layers.Dense(1), spoils
        self.batches = tf.Variable(0, trainable=False)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, given: Any) -> Any:
        x, y = given
        for call in range(2):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
                if call == self.spoils:
                    loss *= tf.where(self.batches % 4 == 1, math.nan, 1.0)
            weights = self.trainable_weights
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.batches.assign_add(1)
        return {"loss": loss}


@pytest.mark.parametrize("spoils", [None, 0, 1])
@pytest.mark.parametrize("steps", [1, 4])
def test_several_updates_in_a_step(steps: int, spoils: int | None) -> None:
    """A step in which any update is skipped is reported once, with its batch."""
    reports = Reports()
    made = Twice(spoils)
    made.compile("sgd", "mse", steps_per_execution=steps)
    given = data(nan_in=[1, 5, 9] if spoils is None else [])
    made.fit(given, verbose=0, callbacks=[reports.watchdog()])
    assert reports.places == [(0, 1, 1), (0, 5, 1), (0, 9, 1)]
    assert [[each.replica for each in fault.culprits] for fault in reports] == [[0]] * 3
    assert all(np.isfinite(weight).all() for weight in made.get_weights())


@pytest.mark.parametrize("strategy", ["mirrored", "central"])
def test_skips_in_executions_of_two_replicas(strategy: str) -> None:
    devices = ["CPU:0", "CPU:1"]
    if strategy == "mirrored":
        scope = tf.distribute.MirroredStrategy(devices).scope()
    else:
        scope = tf.distribute.experimental.CentralStorageStrategy(devices, "CPU:0").scope()
    reports = Reports()
    with scope:
        made = model(steps_per_execution=4)
    kd.adapt(made).fit(data(nan_in=[1, 5, 6]), verbose=0, callbacks=[reports.watchdog()])
    assert reports.places == [(0, 1, 1), (0, 5, 1), (0, 6, 2)]
    assert np.isfinite(made.get_weights()[0]).all()


def test_logs() -> None:
    """After a skipped batch, other callbacks see the metrics without it."""
    seen: list[float] = []

    class Sees(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(logs["loss"])

    trained(data(nan_in=[3]), Sees(), kd.NaNWatchdog())
    assert np.isfinite(seen).all()
    assert seen[3] == seen[2]


def test_nothing_but_faults(tmp_path: Path) -> None:
    """An epoch without any update has a loss of NaN instead of 0, and no checkpoint."""
    reports = Reports()
    _, history = trained(
        data(nan_in=range(BATCHES)), reports.watchdog(max_skips=99), folder=tmp_path
    )
    assert math.isnan(history["loss"][0])
    assert math.isnan(history["mae"][0])
    assert not list(tmp_path.rglob("step-*"))


def test_rollback_within_the_epoch(tmp_path: Path) -> None:
    """After too many consecutive skips, the result is that of a training without the batches since
    the checkpoint, including metrics."""
    reports = Reports()
    found = trained(
        data(nan_in=[5, 6]), reports.watchdog(max_skips=1), folder=tmp_path, save_freq=4, epochs=1
    )
    assert reports.places == [(0, 5, 1), (0, 6, 2)]
    assert found == trained(data(absent=[4, 5, 6]))


def test_rollback_to_an_earlier_epoch(tmp_path: Path) -> None:
    """The same holds for a checkpoint at the end of an earlier epoch."""
    both = data().concatenate(data(nan_in=[2, 3]))
    made = model()
    backup = kd.BackupAndRestore(tmp_path, delete_checkpoint=False)
    history = made.fit(
        both.repeat(),
        epochs=2,
        steps_per_epoch=BATCHES,
        verbose=0,
        callbacks=[backup, Waits(backup), kd.NaNWatchdog(max_skips=1)],
    ).history
    expected = model()
    epochs = [expected.fit(x, verbose=0).history for x in (data(), data(absent=[0, 1, 2, 3]))]
    assert small.state(made) == small.state(expected)
    assert history["loss"] == [epoch["loss"][0] for epoch in epochs]


def test_ends(tmp_path: Path) -> None:
    """Training ends with the reason: no BackupAndRestore, no checkpoint, or NaN again."""
    bad = data(nan_in=range(3, BATCHES))
    with pytest.raises(NonFiniteError, match=r"without a keras_distplug\.Backup"):
        trained(bad, kd.NaNWatchdog(max_skips=1))
    with pytest.raises(NonFiniteError, match="there is no checkpoint yet"):
        trained(bad, kd.NaNWatchdog(max_skips=1), folder=tmp_path / "a")
    reports = Reports()
    with pytest.raises(NonFiniteError, match=r"2 consecutive updates .* even after 1 rollback\."):
        trained(bad, reports.watchdog(max_skips=1), folder=tmp_path / "b", save_freq=2)
    assert reports.places == [(0, 3, 1), (0, 4, 2), (0, 5, 1), (0, 6, 2)]
    reports = Reports()
    with pytest.raises(NonFiniteError, match="1 consecutive update skipped"):
        trained(bad, reports.watchdog(max_skips=0, max_rollbacks=0), folder=tmp_path / "c")
    assert reports.places == [(0, 3, 1)]


@pytest.mark.parametrize("at", [(0, 2), (0, 3), (0, 6), (1, 0)])
def test_resumed(at: tuple[int, int], tmp_path: Path) -> None:
    """A training that is interrupted around skipped batches has the result of an uninterrupted one:
    bits, History, and the number of consecutive skips."""

    def fit(folder: Path, stop: small.Stop, reports: Reports) -> Any:
        return trained(
            data(nan_in=[2, 3, 4]),
            stop,
            reports.watchdog(max_skips=3),
            folder=folder,
            save_freq=1,
            epochs=2,
        )

    whole, first, second = Reports(), Reports(), Reports()
    expected = fit(tmp_path / "whole", small.Stop(), whole)
    with pytest.raises(small.Interrupted):
        fit(tmp_path / "two", small.Stop(*at), first)
    assert fit(tmp_path / "two", small.Stop(), second) == expected
    # The last batch before the interruption was not saved, and is trained again.
    again = [place for place in first.places if place[:2] != at]
    assert again + second.places == whole.places


def test_own_instance_replaces_the_default(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The user's own instance replaces the one from `defaults()`."""
    reports = Reports()
    callbacks = [*kd.defaults(tmp_path), reports.watchdog()]
    trained(data(nan_in=[3]), *callbacks)
    assert reports.places == [(0, 3, 1)]
    assert len({each for each in caplog.messages if "an update was skipped" in each}) == 1


@pytest.mark.parametrize("is_first", [True, False])
def test_own_instance_first_or_last(is_first: bool, tmp_path: Path) -> None:
    """The arguments of the user's own instance apply, wherever it is in the list."""
    own, ours = kd.NaNWatchdog(max_score=1e-9), kd.defaults(tmp_path)
    made = model()
    many = data().repeat(5)
    made.fit(many, verbose=0, callbacks=[own, *ours] if is_first else [*ours, own])
    assert own._gate.max_score == 1e-9
    assert len(own._gate.windows()["optimizer, norms"]) < 50


def test_evaluate() -> None:
    """`evaluate` with it has no effect on a later `fit` without it."""
    made = model()
    made.evaluate(data(), verbose=0, callbacks=[kd.NaNWatchdog()])
    made.predict(data(), verbose=0, callbacks=[kd.NaNWatchdog()])
    made.fit(data(nan_in=[3]), verbose=0)
    assert np.isnan(made.get_weights()[0]).all()


def test_unobservable_step() -> None:
    """A step that bypasses the optimizers causes a warning."""

    class Past(keras.Model):
        def call(self, x):
            return x

        def train_step(self, data):
            return {"loss": tf.constant(0.0)}

    made = Past()
    made.compile("sgd")
    with pytest.warns(UserWarning, match="NaNWatchdog cannot observe this model's updates"):
        made.fit(data(), verbose=0, callbacks=[kd.NaNWatchdog()])


def kept_in(folder: Path) -> list[tuple[incident_files.Incident, Any]]:
    files = open_files(folder)
    return [incident_files.read(files, name) for name in incident_files.names(files)]


def test_diagnosed(tmp_path: Path) -> None:
    """A skipped batch is recomputed, reported with its first non-finite value, and saved unchanged;
    the training is not affected."""
    reports = Reports()
    found = trained(data(nan_in=[3, 7]), reports.watchdog(), folder=tmp_path)
    assert found == trained(data(absent=[3, 7]))
    origin = "the batch (4 of 32 values in `x` are not finite, first in sample 4 of 8)"
    assert [each.culprits[0].origin for each in reports] == [origin] * 2
    assert str(reports[0]).endswith(f"; NaN or Inf first appears in {origin}")
    kept = kept_in(tmp_path)
    assert [(each.epoch, each.batch, each.replica) for each, _ in kept] == [(0, 3, 0), (0, 7, 0)]
    assert [each.told for each, _ in kept] == [str(each.culprits[0]) for each in reports]
    for (each, batch), expected in zip(kept, (3, 7), strict=True):
        x, y = list(data(nan_in=[3, 7]))[expected]
        assert np.array_equal(batch[0], x, equal_nan=True)
        assert np.array_equal(batch[1], y)
        assert each.run == "run-0001"


class OnceInTheGraph(keras.layers.Layer):
    """Simulates a broken chip: NaN in one step of the graph, and never again."""

    def build(self, shape):
        self.calls = tf.Variable(0, trainable=False)

    def call(self, inputs):
        if tf.executing_eagerly():
            return inputs
        spoils = tf.equal(self.calls.assign_add(1), 4)
        return tf.where(spoils, inputs * math.nan, inputs)


def test_transient(tmp_path: Path) -> None:
    """A fault that disappears when the batch is recomputed is reported as transient."""
    reports = Reports()
    made = model()
    made = keras.Sequential([keras.Input((4,)), OnceInTheGraph(), *made.layers])
    made.compile("adam", "mse")
    made.fit(data(), verbose=0, callbacks=[kd.BackupAndRestore(tmp_path), reports.watchdog()])
    assert reports.places == [(0, 3, 1)]
    assert reports[0].culprits[0].is_transient
    assert str(reports[0]).endswith("when recomputed, all values are finite")
    assert len(kept_in(tmp_path)) == 1


@pytest.mark.parametrize(("limit", "kept"), [(0, 0), (2, 2)])
def test_limit(limit: int, kept: int, tmp_path: Path) -> None:
    """Only the first `max_incidents` batches are diagnosed."""
    reports = Reports()
    trained(data(nan_in=[1, 3, 5]), reports.watchdog(max_incidents=limit), folder=tmp_path)
    assert [each.culprits[0].origin is not None for each in reports] == [
        number < limit for number in range(3)
    ]
    assert len(kept_in(tmp_path)) == kept


def test_without_backup() -> None:
    """Without a BackupAndRestore, the diagnosis is still reported."""
    reports = Reports()
    trained(data(nan_in=[1]), reports.watchdog())
    assert reports[0].culprits[0].origin is not None


def test_outlier_is_saved(tmp_path: Path) -> None:
    """A batch whose gradients are finite outliers is saved, too."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50 * 8, 4)).astype("float32")
    y = x[:, :1] * 2
    y[42 * 8] *= 1e6
    reports = Reports()
    made = model()
    made.fit(
        tf.data.Dataset.from_tensor_slices((x, y)).batch(8),
        verbose=0,
        callbacks=[kd.BackupAndRestore(tmp_path), reports.watchdog(max_score=20)],
    )
    assert reports.places == [(0, 42, 1)]
    [(incident, batch)] = kept_in(tmp_path)
    assert incident.batch == 42
    assert np.array_equal(batch[1], y[42 * 8 : 43 * 8])


def test_storage_that_fails(tmp_path: Path) -> None:
    """Training continues, with a warning that names the batch."""
    (tmp_path / "incidents").write_text("in the way")
    reports = Reports()
    with pytest.warns(UserWarning, match="epoch-1-batch-4-replica-0.* could not be saved"):
        found = trained(data(nan_in=[3]), reports.watchdog(), folder=tmp_path)
    assert found == trained(data(absent=[3]))


class Refuses(keras.layers.Layer):
    """A step that cannot be called outside of a graph."""

    def call(self, inputs):
        if tf.executing_eagerly():
            raise ValueError("not eagerly")
        return inputs


def test_batch_that_cannot_be_recomputed() -> None:
    """The failure is reported, and training continues."""
    reports = Reports()
    made = keras.Sequential([keras.Input((4,)), Refuses(), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="could not be recomputed: ValueError"):
        made.fit(data(nan_in=[3]), verbose=0, callbacks=[reports.watchdog()])
    assert reports.places == [(0, 3, 1)]
    assert reports[0].culprits[0].origin is None
    assert not reports[0].culprits[0].is_transient


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_skips": -1},
        {"max_skips": 1.5},
        {"max_rollbacks": True},
        {"max_incidents": -1},
        {"max_score": 0},
    ],
)
def test_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(arguments))):
        kd.NaNWatchdog(**arguments)


def of(replica: int, norm: float, *variables: str, loss: float = 1.0) -> ReplicaValues:
    return ReplicaValues(replica, "worker-0 on here", loss, norm, variables)


@pytest.mark.parametrize(
    ("replicas", "blamed"),
    [
        ([of(0, math.nan, "a"), of(1, 1.0)], [0]),
        ([of(0, 1.0), of(1, 1.0, loss=math.inf)], [1]),
        ([of(0, math.nan, "a"), of(1, math.nan, "a")], [0, 1]),
        ([of(0, 1.0), of(1, 90.0), of(2, 1.5)], [1]),
        ([of(0, 90.0), of(1, 91.0), of(2, 89.0)], [0, 1, 2]),
        ([of(0, 90.0)], [0]),
    ],
)
def test_culprits(replicas: list[ReplicaValues], blamed: list[int]) -> None:
    """The culprits are replicas with non-finite gradients or loss, otherwise outliers, or all
    replicas if all are affected."""
    assert [each.replica for each in find_culprits(replicas)] == blamed
