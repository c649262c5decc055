"""Invalid input is an error with a remedy, raised before any training, and costs nothing."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from support import small  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.core.errors import ClusterError, ConfigurationError, DataError, ModelError  # noqa: E402
from keras_distplug.data import carry  # noqa: E402

X, Y = small.X, small.Y


@pytest.fixture(scope="module")
def mirrored() -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture
def refuse(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Calls `distributed_fit`, which must raise; afterwards nothing must have been trained."""
    counted = small.Stop()

    def refuse(error: type[Exception], match: str, model: Any, *args: Any, **more: Any) -> None:
        callbacks = [counted, *more.pop("callbacks", [])]
        more.setdefault("directory", tmp_path / "run")
        with pytest.raises(error, match=match):
            kd.distributed_fit(model, *args, callbacks=callbacks, verbose=0, **more)

    yield refuse
    assert counted.batches == 0
    assert not list(tmp_path.rglob("MANIFEST.json"))


class NoConfig(keras.Model):
    def __init__(self, units: int) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(units)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)


class OwnCompile(keras.Sequential):
    def compile(self, temperature: float) -> None:  # type: ignore[override]
        super().compile("adam", "mse")


class WrappingCompile(keras.Sequential):
    def compile(self, optimizer: Any, loss: Any) -> None:  # type: ignore[override]
        super().compile(optimizer, lambda y, y_pred: 2 * loss(y, y_pred))


class HidingCompile(keras.Sequential):
    def compile(self, **more: Any) -> None:  # type: ignore[override]
        self.scale = more.pop("scale", 1.0)
        super().compile(**more)


def test_model(refuse: Callable[..., None], mirrored: tf.distribute.Strategy) -> None:
    """The model must be compiled, of a kind that can be moved, under the requested strategy."""
    refuse(ModelError, "expects a compiled keras.Model.*type int, passed as", 3, X, Y)
    refuse(ModelError, "type str, returned by the function", lambda: "model", X, Y)
    refuse(ModelError, "is not compiled. Call", keras.Sequential([keras.layers.Dense(1)]), X, Y)
    no_config = NoConfig(1)
    no_config.compile("sgd", "mse")
    refuse(ModelError, "get_config", no_config, X, Y, strategy=mirrored)
    own = OwnCompile([keras.Input((4,)), keras.layers.Dense(1)])
    own.compile(2.0)
    refuse(
        ModelError, "overrides `compile`.*`temperature` is unknown", own, X, Y, strategy=mirrored
    )
    own = WrappingCompile([keras.Input((4,)), keras.layers.Dense(1)])
    own.compile("sgd", keras.losses.MeanSquaredError())
    refuse(ModelError, "a second call sets `loss`", own, X, Y, strategy=mirrored)
    own = HidingCompile([keras.Input((4,)), keras.layers.Dense(1)])
    own.compile(optimizer="sgd", loss="mse", scale=2.0)
    refuse(
        ModelError, "a second call sets `scale` to 1.0 instead of 2.0", own, X, Y, strategy=mirrored
    )
    lookup = keras.Sequential([keras.layers.StringLookup(vocabulary=["a"])])
    lookup.compile("sgd", "mse")
    refuse(ModelError, "lookup table of layer", lookup, X, Y, strategy=mirrored)
    with mirrored.scope():
        placed = small.model()
    other = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    refuse(ConfigurationError, "is a different one", placed, X, Y, strategy=other)


def test_strategy(refuse: Callable[..., None]) -> None:
    """The strategy must be known, supported, and suit the cluster."""
    model = small.model()
    refuse(
        ConfigurationError,
        "Unknown strategy.*'mirror'.*'one_device'",
        model,
        X,
        Y,
        strategy="mirror",
    )
    refuse(ConfigurationError, "name or a tf.distribute.Strategy.*int", model, X, Y, strategy=3)
    refuse(
        ConfigurationError,
        "a single process. Missing: chief, worker, ps",
        model,
        X,
        Y,
        strategy="parameter_server",
    )
    refuse(ConfigurationError, "at least two workers", model, X, Y, strategy="multi_worker")


@pytest.mark.parametrize(
    ("tf_config", "error", "match"),
    [
        ("{", ClusterError, "TF_CONFIG"),
        ({"cluster": {"worker": ["a:1", "b:1"]}}, ClusterError, "task"),
        (
            {
                "cluster": {"worker": ["a:1", "b:1"]},
                "task": {"type": "worker", "index": 2},
            },
            ClusterError,
            "index",
        ),
        (
            {
                "cluster": {"worker": ["a:1"], "ps": ["b:1"]},
                "task": {"type": "worker", "index": 0},
            },
            ConfigurationError,
            "'parameter_server' needs .*Missing: chief",
        ),
    ],
)
def test_tf_config(
    refuse: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tf_config: Any,
    error: type[Exception],
    match: str,
) -> None:
    """TF_CONFIG must describe a cluster that includes this process."""
    text = tf_config if isinstance(tf_config, str) else json.dumps(tf_config)
    monkeypatch.setenv("TF_CONFIG", text)
    refuse(error, match, small.model(), X, Y)


def test_data(refuse: Callable[..., None], mirrored: tf.distribute.Strategy) -> None:
    """The data must be batched, of one length, large enough to be split."""
    model = small.model()
    dataset = tf.data.Dataset.from_tensor_slices((X, Y))
    batched = dataset.batch(8)
    refuse(DataError, r"not batched.*\.batch\(global_batch_size\)", model, dataset)
    vectors = tf.data.Dataset.from_tensor_slices((X, np.repeat(Y, 2, axis=1)))
    refuse(DataError, "not batched", model, vectors)
    refuse(DataError, "`y` must be part of the dataset", model, batched, Y)
    refuse(DataError, "`sample_weight` must be part of", model, batched, sample_weight=Y)
    refuse(DataError, "`batch_size` applies to arrays", model, batched, batch_size=8)
    refuse(DataError, "`validation_split` requires `x`", model, batched, validation_split=0.5)
    refuse(DataError, "same number of samples", model, X, Y[:-1])
    refuse(DataError, "holds no samples", model, X[:0], Y[:0])
    refuse(DataError, "type object", model, object())
    refuse(DataError, "type NoneType", model)
    refuse(
        DataError,
        "leave samples for training and for validation",
        model,
        X,
        Y,
        validation_split=0.99,
    )
    for given in ({"x": X, "y": Y, "batch_size": 1}, {"x": dataset.batch(1)}):
        match = "batches of 1 samples for 2 replicas. Use batches of at least 2"
        refuse(DataError, match, model, strategy=mirrored, **given)


def test_data_that_looks_odd(tmp_path: Path) -> None:
    """Batched scalars for an input of one feature, and inputs of different ranks, count as
    batched."""
    one = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    one.compile("sgd", "mse")
    column = tf.data.Dataset.from_tensor_slices((X[:, 0], Y)).batch(8)
    kd.distributed_fit(one, column, directory=tmp_path / "one", verbose=0)
    inputs = {"b": keras.Input((2, 2), name="b"), "a": keras.Input((4,), name="a")}
    both = keras.layers.Concatenate()([keras.layers.Flatten()(inputs["b"]), inputs["a"]])
    two = keras.Model(inputs, keras.layers.Dense(1)(both))
    two.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices(({"a": X, "b": X.reshape(-1, 2, 2)}, Y)).batch(8)
    kd.distributed_fit(two, data, directory=tmp_path / "two", verbose=0)


def test_directory(refuse: Callable[..., None], tmp_path: Path) -> None:
    """The directory must be a folder, or a URL of a known store, and given once."""
    model = small.model()
    (tmp_path / "file").touch()
    refuse(ConfigurationError, "file is a file", model, X, Y, directory=tmp_path / "file" / "a")
    refuse(
        ConfigurationError, "Received: ftp://host/a. Mount", model, X, Y, directory="ftp://host/a"
    )
    refuse(ConfigurationError, "Expected a checkpoint directory", model, X, Y, directory="")
    refuse(
        ConfigurationError,
        "cannot be combined with a BackupAndRestore",
        model,
        X,
        Y,
        callbacks=[kd.BackupAndRestore(tmp_path / "b")],
    )


@pytest.mark.parametrize("save_freq", [0, -1, True, "batch", 1.5, None])
def test_save_freq(save_freq: Any, tmp_path: Path) -> None:
    """`save_freq` must be "epoch", "auto", a number of batches, a time, or False."""
    with pytest.raises(ConfigurationError, match='`save_freq` to be "epoch", "auto", False'):
        kd.defaults(tmp_path, save_freq=save_freq)


def numbers() -> Iterator[np.ndarray]:
    yield np.zeros((2, 4), "float32")


@pytest.mark.parametrize(
    "dataset",
    [
        lambda: tf.data.Dataset.from_generator(
            numbers, output_signature=tf.TensorSpec((2, 4), tf.float32)
        ),
        lambda: tf.data.Dataset.range(4).map(
            lambda x: tf.py_function(lambda x: x + 1, [x], tf.int64)
        ),
    ],
)
def test_dataset_that_cannot_be_moved(dataset: Callable[[], tf.data.Dataset]) -> None:
    """The error for a dataset of Python code, made too early, names both remedies."""
    with pytest.raises(DataError, match=r"calls Python code") as raised:
        carry.pack({"x": dataset()})
    assert "keras_distplug.init()" in str(raised.value)
    assert "distributed_fit(model, x=make_x, ...)" in str(raised.value)


def on_fault(fault: Any) -> None:
    """A custom function."""


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (
            lambda folder: kd.BackupAndRestore(Path("runs/mnist"), save_freq="auto"),
            "BackupAndRestore(backup_dir='runs/mnist', save_freq='auto')",
        ),
        (
            lambda folder: kd.BackupAndRestore(
                "runs/mnist",
                delete_checkpoint=False,
                local_tier=folder,
                max_overhead=0.1,
                keep_last=5,
                keep_every_steps=100,
                keep_best=("loss", "min", 1),
            ),
            "BackupAndRestore(backup_dir='runs/mnist', delete_checkpoint=False, "
            "saving=Saving(max_overhead=0.1), retention=Retention(keep_last=5, "
            "keep_every_steps=100, keep_best=('loss', 'min', 1)), "
            "local=LocalCheckpoints(local_tier='{folder}'))",
        ),
        (
            lambda folder: kd.BackupAndRestore(
                "memory://me:hidden@place:1/mnist", storage_options={"secret": "hidden"}
            ),
            "BackupAndRestore(backup_dir='memory://place:1/mnist', storage_options={{...}})",
        ),
        (lambda folder: kd.HangWatchdog(), "HangWatchdog()"),
        (lambda folder: kd.HangWatchdog(60, exit=True), "HangWatchdog(step_secs=60, exit=True)"),
        (
            lambda folder: kd.NaNWatchdog(max_skips=1, on_fault=on_fault),
            "NaNWatchdog(max_skips=1, on_fault=on_fault)",
        ),
        (
            lambda folder: kd.PreemptionHandler([signal.SIGTERM], cloud=False),
            "PreemptionHandler(signals=(SIGTERM,), cloud=False)",
        ),
        (lambda folder: kd.StragglerWatchdog(windows=9), "StragglerWatchdog(windows=9)"),
        (
            lambda folder: kd.ReplicaMetrics(
                "memory://logs", storage_options={"token": "hidden"}, logs=["loss_spread"]
            ),
            "ReplicaMetrics(log_dir='memory://logs', storage_options={{...}}, "
            "logs=('loss_spread',))",
        ),
        (
            lambda folder: kd.RunLog("memory://logs", storage_options={"token": "hidden"}),
            "RunLog(log_dir='memory://logs', storage_options={{...}})",
        ),
    ],
)
def test_repr(make: Callable[[Path], Any], shown: str, tmp_path: Path) -> None:
    """A callback's repr is the call that makes it, without secrets."""
    assert repr(make(tmp_path)) == shown.format(folder=tmp_path)


def test_repr_of_derived() -> None:
    """The repr of a subclass of ours shows the arguments that it has from that."""

    class Own(kd.NaNWatchdog):
        def __init__(self, label: str, **others: Any) -> None:
            super().__init__(**others)
            self.label = label

    assert repr(Own("a", max_skips=1)).endswith("Own(label='a')")


def test_two_backups(tmp_path: Path) -> None:
    """A user's BackupAndRestore replaces that of `defaults()`; two are an error."""
    for place in (0, -1):
        own = kd.BackupAndRestore(tmp_path / f"own{place}", delete_checkpoint=False)
        callbacks = kd.defaults(tmp_path / "default")
        callbacks.insert(place, own)
        small.model().fit(small.X, small.Y, verbose=0, callbacks=callbacks)
        assert (tmp_path / f"own{place}" / "run-0001" / "log").exists()
        assert not (tmp_path / "default").exists()
    other = kd.BackupAndRestore(tmp_path / "other")
    with pytest.raises(ConfigurationError, match=r"Expected one Backup.*own-1 and .*other"):
        small.model().fit(small.X, small.Y, verbose=0, callbacks=[own, other])


def test_separate_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of a cluster whose models lack the strategy would share one directory."""
    hosts = {"worker": ["localhost:1", "localhost:2"]}
    task = {"type": "worker", "index": 1}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": hosts, "task": task}))
    with pytest.raises(ConfigurationError, match=r"TF_CONFIG lists 2 workers.*without a strategy"):
        small.model().fit(X, Y, verbose=0, callbacks=[kd.BackupAndRestore(tmp_path)])
    assert list(tmp_path.iterdir()) == []
