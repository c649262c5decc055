"""Metrics of replicas in one process. Several workers are tested in
tests/scenarios/test_metrics_of_workers.py."""

from __future__ import annotations

import errno
import math
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from support import small  # noqa: E402
from support.curves import curves_in  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.backend.tensorflow import trainer  # noqa: E402
from keras_distplug.backend.tensorflow.replicas import replica_values  # noqa: E402
from keras_distplug.core.errors import ConfigurationError  # noqa: E402
from keras_distplug.core.events import Diverged  # noqa: E402
from keras_distplug.replicas.divergence import Divergence  # noqa: E402
from keras_distplug.runlog import log_files  # noqa: E402
from keras_distplug.step.step_reports import StepReport  # noqa: E402
from keras_distplug.storage.files import open_files  # noqa: E402

BATCHES = 6
BATCH = 8


def strategy_of(name: str) -> tf.distribute.Strategy:
    devices = ["CPU:0", "CPU:1"]
    if name == "mirrored":
        return tf.distribute.MirroredStrategy(devices)
    if name == "central":
        return tf.distribute.experimental.CentralStorageStrategy(devices, "CPU:0")
    return tf.distribute.get_strategy()


def model(strategy: str = "mirrored", kind: type = keras.Model, **compiled: Any) -> keras.Model:
    with strategy_of(strategy).scope():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(6, activation="tanh")(inputs)
        made = kind(inputs, keras.layers.Dense(1)(hidden))
        make = compiled.pop("optimizer", lambda: keras.optimizers.Adam(0.01))
        made.compile(make(), "mse", **compiled)
    return trainer.adapt(made)


def arrays(samples: int = BATCHES * BATCH) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return (
        rng.normal(size=(samples, 4)).astype("float32"),
        rng.normal(size=(samples, 1)).astype("float32"),
    )


def data(samples: int = BATCHES * BATCH) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays(samples)).batch(BATCH)


class Reported(kd.ReplicaMetrics):
    """Keeps the reports that the chief receives."""

    def __init__(self, every_steps: int = 1, **arguments: Any) -> None:
        super().__init__(every_steps=every_steps, **arguments)
        self.reports: list[StepReport] = []

    def _take(self, reports: list[StepReport]) -> None:
        self.reports += reports
        super()._take(reports)


def expected(made: keras.Model, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Returns loss and gradient norm of these samples alone, computed with a tape."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((y - made(x, training=True)) ** 2)
    gradients = tape.gradient(loss, [v.value for v in made.trainable_variables])
    return float(loss), float(tf.linalg.global_norm(gradients))


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"run_eagerly": True},
        {"optimizer": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)},
        {"optimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))},
    ],
    ids=["plain", "eager", "accumulation", "loss scale"],
)
@pytest.mark.parametrize("strategy", ["one", "mirrored", "central"])
def test_own_values(strategy: str, arguments: dict[str, Any]) -> None:
    """A replica's values are those of its samples, even if it has fewer than others."""
    made, alone = model(strategy, **arguments), model("one")
    weights: list[list[np.ndarray]] = []

    class Remembers(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            weights.append(made.get_weights())

    metrics = Reported()
    samples = BATCHES * BATCH - 5  # the last batch has three
    made.fit(data(samples), verbose=0, callbacks=[metrics, Remembers()])
    x, y = arrays(samples)
    replicas = made.distribute_strategy.num_replicas_in_sync
    _, *others = metrics.reports
    # The first step is not timed.
    assert [report.steps for report in metrics.reports] == [2, *[1] * (BATCHES - 2)]
    for number, report in enumerate(others, 2):
        assert sorted(each.replica for each in report.replicas) == list(range(replicas))
        begin, end = BATCH * number, min(BATCH * (number + 1), samples)
        alone.set_weights(weights[number])
        for each in report.replicas:
            share = math.ceil((end - begin) / replicas)
            own = slice(begin + each.replica * share, min(begin + (each.replica + 1) * share, end))
            assert each.samples == own.stop - own.start
            loss, norm = expected(alone, x[own], y[own])
            assert each.loss == pytest.approx(loss, rel=1e-4)
            assert each.gradient_norm == pytest.approx(norm, rel=1e-4)
            assert each.compute_s > 0
            if strategy != "central":
                assert (each.sync_s is not None) == (strategy == "mirrored")
        assert report.step_s > 0
        assert report.input_s is not None
        assert report.memory_bytes is not None
        assert report.memory_bytes > 50e6


def test_curves(tmp_path: Path) -> None:
    """TensorBoard gets a curve for every replica and worker, and their spread."""
    made = model()
    metrics = Reported(log_dir=tmp_path, every_steps=2)
    made.fit(data(), epochs=2, verbose=0, callbacks=[metrics])
    curves = curves_in(tmp_path)
    every = {f"distplug/{name}" for name in ("loss", "gradient_norm", "samples_per_s")}
    every |= {"distplug/compute_ms", "distplug/sync_ms"}
    whole = {f"distplug/{name}" for name in ("step_ms", "input_ms", "memory_mb")}
    assert {run: set(tags) for run, tags in curves.items()} == {
        "replica-0": every,
        "replica-1": every,
        "worker-0": whole,
        **dict.fromkeys(("min", "median", "p95", "max"), every),
    }
    reported = [(r.step, [each.loss for each in r.replicas]) for r in metrics.reports]
    assert [step for step, _ in reported] == [2, 4, 6, 8, 10, 12]
    for place in range(2):
        own = [(step, pytest.approx(losses[place])) for step, losses in reported]
        assert curves[f"replica-{place}"]["distplug/loss"] == own
    for how, of in (("min", min), ("max", max)):
        assert curves[how]["distplug/loss"] == [(s, pytest.approx(of(v))) for s, v in reported]


def test_curves_continue(tmp_path: Path) -> None:
    """After resuming from a checkpoint, curves continue at the right step."""
    for epochs in (1, 2):
        callbacks = [*kd.defaults(tmp_path / "run"), kd.ReplicaMetrics(tmp_path / "logs", 3)]
        model().fit(data(), epochs=epochs, verbose=0, callbacks=callbacks)
    steps = [step for step, _ in curves_in(tmp_path / "logs")["replica-0"]["distplug/loss"]]
    assert steps == [3, 6, 9, 12]


def test_in_logs() -> None:
    """Requested values are in the logs of every epoch, and thus in `History`."""
    names = ["loss_spread", "loss_max", "gradient_norm_median", "step_ms_max", "samples_per_s_p95"]
    seen: list[Mapping[str, Any]] = []
    metrics = Reported(logs=names)
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs)))
    history = model().fit(data(), epochs=2, verbose=0, callbacks=[note, metrics]).history
    assert set(history) == {"loss", *(f"replica/{name}" for name in names)}
    for epoch in range(2):
        own = [r for r in metrics.reports if epoch * BATCHES < r.step <= (epoch + 1) * BATCHES]
        losses = [
            np.average([r.replicas[place].loss for r in own], weights=[r.steps for r in own])
            for place in range(2)
        ]
        assert history["replica/loss_spread"][epoch] == pytest.approx(max(losses) - min(losses))
        assert history["replica/loss_max"][epoch] == pytest.approx(max(losses))
        assert seen[epoch] == {name: each[epoch] for name, each in history.items()}


def test_early_stopping_on_spread() -> None:
    stops = keras.callbacks.EarlyStopping("replica/loss_spread", mode="min", patience=0)
    metrics = kd.ReplicaMetrics(every_steps=2, logs=["loss_spread"])
    history = model().fit(data(), epochs=9, verbose=0, callbacks=[stops, metrics]).history
    *before, last = history["replica/loss_spread"]
    assert len(before) < 8
    assert last >= min(before)


@pytest.mark.parametrize("strategy", ["one", "mirrored", "central"])
@pytest.mark.parametrize("kind", ["executions", "defaults"])
def test_same_bits(strategy: str, kind: str, tmp_path: Path) -> None:
    """The results of training are bit-identical with and without the callback."""
    arguments = {"steps_per_execution": 3} if kind == "executions" else {}
    bare, watched = (model(strategy, **arguments) for _ in range(2))
    metrics = kd.ReplicaMetrics(
        tmp_path / "logs", 2, check_every_steps=2, fingerprints=kind == "defaults"
    )
    others = kd.defaults(tmp_path / "run") if kind == "defaults" else []
    histories = [
        bare.fit(data(), epochs=2, verbose=0).history,
        watched.fit(data(), epochs=2, verbose=0, callbacks=[*others, metrics]).history,
    ]
    assert histories[0] == histories[1]
    assert small.state(watched) == small.state(bare)


class Drifts(keras.callbacks.Callback):
    """Changes a variable on the last replica after a batch."""

    def __init__(self, variable: int, behind: int) -> None:
        super().__init__()
        self.variable, self.behind, self.seen = variable, behind, 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if self.seen == self.behind:
            variable = self.model.trainable_variables[self.variable]
            *others, last = [np.array(each) for each in replica_values.parts(variable)]
            last.flat[0] = np.nextafter(last.flat[0], np.float32(9))  # the smallest change
            replica_values.set_parts(variable, [*others, last])


@pytest.mark.parametrize("strategy", ["mirrored", "central"])
def test_diverged(strategy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A single-bit difference between weights is reported once. With central storage there is only
    one copy, which cannot differ."""
    heard: list[Divergence] = []
    metrics = kd.ReplicaMetrics(check_every_steps=2, on_divergence=heard.append)
    callbacks = [Drifts(1, behind=3), metrics, kd.RunLog(tmp_path)]
    model(strategy).fit(data(), epochs=2, verbose=0, callbacks=callbacks)
    [fit], _ = log_files.read(open_files(tmp_path), "")
    logged = [each.event for each in fit.entries if isinstance(each.event, Diverged)]
    assert [(each.step, each.variable) for each in logged] == [
        (each.step, each.variable) for each in heard
    ]
    if strategy == "central":
        assert not heard
        return
    [found] = heard
    assert found.step == 4
    assert found.variable == "model/dense/bias" or found.variable.endswith("/bias")
    assert found.replicas == (0, 1)  # with two replicas, there is no majority
    assert "replicas: at step 4, the values of `" in caplog.text


def test_never_compared() -> None:
    heard: list[Divergence] = []
    metrics = kd.ReplicaMetrics(check_every_steps=None, on_divergence=heard.append)
    model().fit(data(), epochs=2, verbose=0, callbacks=[Drifts(1, behind=3), metrics])
    assert not heard


@pytest.mark.parametrize("is_same", [True, False])
def test_same_data(is_same: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Replicas that are given the same samples, as by a wrong split, are reported."""
    x, y = arrays()
    halves = [each.reshape(BATCHES, 2, BATCH // 2, -1) for each in (x, y)]
    if is_same:
        halves = [np.repeat(each[:, :1], 2, axis=1) for each in halves]
    x, y = (each.reshape(BATCHES * BATCH, -1) for each in halves)
    doubled = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    metrics = kd.ReplicaMetrics(every_steps=2, fingerprints=True)
    model().fit(doubled, verbose=0, callbacks=[metrics])
    told = "replicas: 0, 1 received the same data in all 2 steps"
    assert caplog.text.count(told) == is_same


class Past(keras.Model):
    def train_step(self, data):
        return {"loss": tf.constant(0.0)}


@pytest.mark.parametrize("arguments", [{"kind": Past}, {"strategy": "one", "jit_compile": True}])
def test_unmeasurable_model(arguments: dict[str, Any], tmp_path: Path) -> None:
    """It warns about metrics that it cannot measure, and records the others."""
    with pytest.warns(UserWarning, match="ReplicaMetrics cannot measure the replicas of this"):
        model(**arguments).fit(data(), verbose=0, callbacks=[kd.ReplicaMetrics(tmp_path, 2)])
    assert {run: set(tags) for run, tags in curves_in(tmp_path).items()} == {
        "worker-0": {"distplug/step_ms", "distplug/memory_mb"}
    }


class OwnLoss(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((y - self(x, training=True)) ** 2)
        self.optimizer.apply(
            tape.gradient(loss, self.trainable_variables), self.trainable_variables
        )
        return {"loss": loss}


def test_custom_loss() -> None:
    """A loss that does not come from `compute_loss` is unknown; other values are known."""
    metrics = Reported(logs=["loss_max", "gradient_norm_max"])
    history = model("one", OwnLoss).fit(data(), verbose=0, callbacks=[metrics]).history
    assert set(history) == {"loss", "replica/gradient_norm_max"}
    assert {each.loss for r in metrics.reports for each in r.replicas} == {None}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"every_steps": 0}, "`every_steps` to be an int >= 1. Received: 0"),
        ({"check_every_steps": 2.5}, "`check_every_steps` to be an int >= 1. Received: 2.5"),
        ({"log_dir": "ftp://host/logs"}, "a URL that starts with one of memory://, .*ftp://host"),
        (
            {"storage_options": {"key": "k"}},
            "`storage_options` only together with `log_dir`",
        ),
        ({"logs": ["loss"]}, "`logs` to be a list of names from loss_min, "),
        ({"logs": "loss_max"}, "`logs` to be a list of names"),
    ],
)
def test_arguments(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        kd.ReplicaMetrics(**arguments)


def test_no_folder(tmp_path: Path) -> None:
    """A folder that cannot be used is an error before training: immediately, or in `fit` if it
    became unusable in the meantime."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"Expected a folder\. Received: .*logs"):
        kd.ReplicaMetrics(tmp_path / "file" / "logs")
    metrics = kd.ReplicaMetrics(tmp_path / "folder" / "logs")
    (tmp_path / "folder").touch()
    made = model()
    before = [each.tobytes() for each in made.get_weights()]
    with pytest.raises(ConfigurationError, match="`log_dir` to be a writable folder"):
        made.fit(data(), verbose=0, callbacks=[metrics])
    assert [each.tobytes() for each in made.get_weights()] == before


def test_curves_in_a_store(tmp_path: Path) -> None:
    """Curves are uploaded to a store as whole files."""
    url = f"memory://{uuid.uuid4().hex}"
    metrics = Reported(log_dir=url, every_steps=2)
    model().fit(data(), epochs=2, verbose=0, callbacks=[metrics])
    files = open_files(url)
    for run in files.names():
        (tmp_path / run).mkdir()
        for name in files.names(run):
            (tmp_path / run / name).write_bytes(files.read(f"{run}/{name}"))
    losses = curves_in(tmp_path)["replica-0"]["distplug/loss"]
    assert losses == [(r.step, pytest.approx(r.replicas[0].loss)) for r in metrics.reports]


def test_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed write of TensorBoard data is reported once, and training continues."""

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("keras_distplug.runlog.event_files.EventFileWriter.add_event", full)
    metrics = Reported(log_dir=tmp_path)
    model().fit(data(), verbose=0, callbacks=[metrics])
    assert len(metrics.reports) == BATCHES - 1
    assert caplog.text.count("are no longer written: [Errno 28] No space left on device") == 1


def test_fit_after_an_error() -> None:
    """After a `fit` that failed, the callback works normally in the next one."""

    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                raise ValueError("on purpose")

    metrics, made = Reported(logs=["loss_max"]), model()
    with pytest.raises(ValueError, match="on purpose"):
        made.fit(data(), verbose=0, callbacks=[Fails(), metrics])
    metrics.reports.clear()
    history = made.fit(data(), verbose=0, callbacks=[metrics]).history
    assert sum(each.steps for each in metrics.reports) == BATCHES
    assert len(history["replica/loss_max"]) == 1


def test_epochs_of_one_batch() -> None:
    """Steps of epochs with a single batch are timed, too."""
    metrics = Reported(every_steps=2)
    model().fit(data(BATCH), epochs=5, verbose=0, callbacks=[metrics])
    assert [each.step for each in metrics.reports] == [2, 3, 4, 5]
