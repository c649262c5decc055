"""Trains under ParameterServerStrategy with all servers in this process, and reports results.

    python serving.py FOLDER [CASE...]

Writes FOLDER/found.json. TensorFlow can form only one cluster per process, so all cases share it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
from support.cluster import free_ports
from tensorflow.python.distribute.coordinator.cluster_coordinator import Cluster

WORKERS, SERVERS = 2, 2
STEPS, BATCH = 40, 16


def serve() -> list[tf.distribute.Server]:
    """Starts workers and parameter servers; the chief finds them in TF_CONFIG."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(1 + WORKERS + SERVERS)]
    cluster = {
        "chief": addresses[:1],
        "worker": addresses[1:-SERVERS],
        "ps": addresses[-SERVERS:],
    }
    # They share the threads of this process, and every waiting one occupies a thread.
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=WORKERS + 4)
    task = {"type": "chief", "index": 0}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    return [
        tf.distribute.Server(tf.train.ClusterSpec(cluster), kind, index, "grpc", config)
        for kind in ("worker", "ps")
        for index in range(len(cluster[kind]))
    ]


servers = serve()

import keras  # noqa: E402

import keras_distplug as kd  # noqa: E402
from keras_distplug.backend.tensorflow.runtime.embedding_tables import merge_parts  # noqa: E402
from keras_distplug.checkpoint import opening  # noqa: E402
from keras_distplug.core.errors import DistplugError  # noqa: E402

FOLDER = Path(sys.argv[1])
rng = np.random.default_rng(0)
X = rng.normal(size=(320, 8)).astype("float32")
Y = (X.sum(1) > 0).astype("float32")


def build(*layers: keras.Layer, optimizer: Any = "adam", **compiled: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.layers.Input((8,)), keras.layers.Dense(16, "relu"), *layers, keras.layers.Dense(1)]
    )
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    metrics = [
        keras.metrics.BinaryAccuracy(threshold=0.0),
        keras.metrics.AUC(from_logits=True, num_thresholds=20),
        keras.metrics.Precision(thresholds=0.0),
    ]
    model.compile(optimizer, loss, metrics=metrics, **compiled)
    return model


def fit(name: str, model: Any, *data: Any, **given: Any) -> keras.callbacks.History:
    defaults = {"steps_per_epoch": STEPS, "verbose": 0, "directory": FOLDER / name}
    return kd.distributed_fit(model, *data, **{**defaults, **given})


def steps_of(model: keras.Model) -> int:
    return int(keras.ops.convert_to_numpy(model.optimizer.iterations))


def value(metric: keras.metrics.Metric, name: str) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(getattr(metric, name)))


def counts() -> dict[str, Any]:
    """Returns the counts of the optimizer and of three kinds of metrics in an epoch."""
    model = fit("counts", build, X, Y, batch_size=BATCH, epochs=3).model
    compiled = model.metrics[1].metrics
    accuracy, auc, precision = compiled
    of_all = sum(
        value(auc, part)[0]
        for part in ("true_positives", "true_negatives", "false_positives", "false_negatives")
    )
    return {
        "steps": steps_of(model),
        "loss": float(value(model.metrics[0], "count")),
        "accuracy": float(value(accuracy, "count")),
        "auc": float(of_all),
        "precision": float(value(precision, "true_positives")[0])
        + float(value(precision, "false_positives")[0]),
    }


def executions() -> dict[str, Any]:
    """Trains with several steps per execution."""
    model = fit("executions", lambda: build(steps_per_execution=5), X, Y, batch_size=BATCH).model
    return {"steps": steps_of(model), "loss": float(value(model.metrics[0], "count"))}


def messages() -> dict[str, int]:
    """Returns the tensors of a step that a worker sends to parameter servers."""
    with mock.patch.object(
        Cluster, "schedule", autospec=True, side_effect=Cluster.schedule
    ) as told:
        model = fit("messages", build, X, Y, batch_size=BATCH).model
    step = told.call_args.args[1]
    places = {inner.name for outer, inner in step.graph.captures if "job:ps" in outer.device}

    def is_there(operation: tf.Operation) -> bool:
        of_variable = any(each.name in places for each in operation.inputs)
        return of_variable or "job:ps" in operation.device

    sent = {
        each.name
        for operation in step.graph.get_operations()
        for each in operation.inputs
        if is_there(operation) and not is_there(each.op) and each.op.type != "Placeholder"
    }
    return {
        "sent": len(sent),
        "gradients": len(model.trainable_variables),
        "sums": len(model.metrics_variables),
    }


def learned() -> dict[str, Any]:
    """Trains and validates, and applies Keras' methods to the trained model."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(320).batch(BATCH)
    layers = (keras.layers.BatchNormalization(), keras.layers.Dropout(0.1))

    def built() -> keras.Model:
        return build(*layers, optimizer=keras.optimizers.Adam(0.01))

    history = fit("learned", built, data, epochs=4, validation_data=(X[:100], Y[:100]))
    model = history.model
    model.save(FOLDER / "model.keras")
    model.save_weights(FOLDER / "model.weights.h5")
    alone = keras.models.load_model(FOLDER / "model.keras")
    again = build(*layers)
    again.load_weights(FOLDER / "model.weights.h5")
    assert "/job:ps" in model.layers[0].kernel.value.device
    assert "/job:ps" not in alone.layers[0].kernel.value.device
    return {
        "history": history.history,
        "evaluate": model.evaluate(X, Y, verbose=0),
        "alone": alone.evaluate(X, Y, verbose=0),
        "predict": float(np.abs(model.predict(X, verbose=0) - again.predict(X, verbose=0)).max()),
        "moving_mean": value(model.layers[1], "moving_mean").tolist(),
        "mean": keras.Sequential(alone.layers[:1]).predict(X, verbose=0).mean(0).tolist(),
    }


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 7  # the last of four samples

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        part = slice(index * BATCH, min((index + 1) * BATCH, 100))
        return X[part], Y[part]


def validated() -> dict[str, Any]:
    """Returns the validation losses per kind of data, and those of one process with the weights."""
    strategy = kd.init()
    data = tf.data.Dataset.from_tensor_slices((X[:100], Y[:100]))
    kinds: dict[str, dict[str, Any]] = {
        "dataset": {"validation_data": data.batch(BATCH)},
        "shuffled": {"validation_data": data.shuffle(100).batch(BATCH)},
        "PyDataset": {"validation_data": Batches(workers=1)},
        "every second": {
            "validation_data": kd.resumable(data.batch(BATCH)),
            "validation_freq": 2,
        },
        "endless": {"validation_data": data.batch(BATCH).repeat(), "validation_steps": 7},
    }
    alone = build()
    found = {}
    for name, given in kinds.items():
        every = given.get("validation_freq", 1)
        expected = []

        def validate(epoch: int, logs: dict[str, float], *, every: int = every) -> None:
            if (epoch + 1) % every == 0:
                alone.set_weights([np.asarray(each) for each in model.get_weights()])  # noqa: B023
                expected.append(alone.evaluate(X[:100], Y[:100], verbose=0)[0])  # noqa: B023

        with strategy.scope():
            model = build()
        losses = keras.callbacks.LambdaCallback(on_epoch_end=validate)
        history = fit(
            f"validated {name}",
            model,
            X,
            Y,
            batch_size=BATCH,
            epochs=4,
            steps_per_epoch=None,
            callbacks=[losses],
            **given,
        )
        again = model.evaluate(given["validation_data"], steps=7, verbose=0)[0]
        found[name] = {"losses": history.history["val_loss"], "expected": expected, "again": again}
    return found


def own_model() -> dict[str, Any]:
    """A model created outside the scope receives the trained weights, also in `resumable` fits."""
    model = build()
    fit("own", model, X, Y, batch_size=BATCH)
    with kd.init().scope():
        placed = build()
    placed.fit(
        kd.resumable(X, Y, batch_size=BATCH), verbose=0, callbacks=kd.defaults(FOLDER / "plain")
    )
    return {"steps": steps_of(model), "plain": steps_of(placed)}


class Wraps(keras.Sequential):
    """Builds a dataset from the arguments of its `fit`."""

    def fit(self, x: Any, y: Any, batch_size: int, **more: Any) -> Any:  # type: ignore[override]
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)
        return super().fit(data.map(lambda x, y: (2 * x, y)), **more)


class Doubles(keras.Sequential):
    """Passes different arrays to Keras' `fit`."""

    def fit(self, x: Any, y: Any, **more: Any) -> Any:  # type: ignore[override]
        return super().fit(2 * x, y, **more)


def own_fit() -> dict[str, Any]:
    """Models whose class overrides `fit`."""

    def of(kind: type[keras.Sequential]) -> list[float]:
        def built() -> keras.Model:
            model = kind(build().layers)
            model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
            return model

        given = {"batch_size": BATCH, "steps_per_epoch": None, "epochs": 2}
        model = fit(kind.__name__, built, X, Y, **given).model
        return [steps_of(model), float(value(model.metrics[0], "count"))]

    return {"wraps": of(Wraps), "doubles": of(Doubles)}


def of_context() -> dict[str, Any]:
    """Workers get the data that a function returns for their own `InputContext`."""

    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
        own = [X, X][context.input_pipeline_id] * 0 + context.input_pipeline_id
        made = tf.data.Dataset.from_tensor_slices((own, np.full(320, context.input_pipeline_id)))
        return made.batch(BATCH).repeat()

    class Seen(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="seen")
            self.seen = self.add_variable((WORKERS,), "zeros")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            one = keras.ops.one_hot(
                keras.ops.cast(keras.ops.reshape(y_true, (-1,)), "int32"), WORKERS
            )
            self.seen.assign_add(keras.ops.sum(one, 0))

        def result(self) -> Any:
            return keras.ops.max(self.seen)

    def built() -> keras.Model:
        model = build()
        model.compile("sgd", "mse", metrics=[Seen()])
        return model

    model = fit("context", built, make).model
    return {"seen": value(model.metrics[1].metrics[0], "seen").tolist()}


def not_finite() -> dict[str, Any]:
    """Batches with NaN do not affect weights, statistics and metrics."""
    x = X.copy()
    x[0] = np.nan  # one batch of 20
    data = tf.data.Dataset.from_tensor_slices((x, Y)).batch(BATCH)
    told: list[Any] = []
    model = fit(
        "nan",
        lambda: build(keras.layers.BatchNormalization()),
        data,
        callbacks=[kd.NaNWatchdog(max_skips=20, on_fault=told.append)],
    ).model
    return {
        "steps": steps_of(model),
        "loss": float(value(model.metrics[0], "count")),
        "finite": all(bool(np.isfinite(v.numpy()).all()) for v in model.variables),
        "told": len(told),
    }


def only_nan() -> dict[str, Any]:
    try:
        fit("only_nan", build, X * np.nan, Y, batch_size=BATCH, epochs=2)
    except DistplugError as error:
        return {"error": type(error).__name__}
    return {}


def resumed_fit() -> dict[str, Any]:
    """A `fit` that an error ends in its second epoch, and the one that resumes it."""

    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if len(self.model.history.epoch) == 1 and batch == 25:
                raise KeyError("on purpose")

    class Counts(keras.callbacks.Callback):
        def __init__(self) -> None:
            self.batches: list[int] = []
            self.began: int | None = None

        def state_dict(self) -> dict[str, Any]:
            return {}  # the state of this fit only

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if self.began is None:
                self.began = steps_of(self.model)
            self.batches.append(batch)

    def backup() -> keras.callbacks.Callback:
        return kd.BackupAndRestore(
            FOLDER / "resumed_fit", save_freq=10, delete_checkpoint=False, on_busy="wait"
        )

    given = {"batch_size": BATCH, "epochs": 2, "directory": None}
    try:
        fit("", build, X, Y, callbacks=[backup(), Fails()], **given)
    except KeyError:
        pass
    else:
        raise AssertionError("nothing has failed")
    counts = Counts()
    model = fit("", build, X, Y, callbacks=[backup(), counts], **given).model
    return {
        "began": counts.began,
        "first": counts.batches[0],
        "steps": steps_of(model),
        "loss": float(value(model.metrics[0], "count")),
        "epochs": model.history.epoch,
    }


def stateful() -> keras.Model:
    model = build(keras.layers.Reshape((4, 4)), keras.layers.LSTM(2))
    model.layers[2].stateful = True  # before a model is built, Keras requires batches of one size
    return model


def refused() -> dict[str, Any]:
    """Returns the errors for invalid use."""
    adam = keras.optimizers.Adam
    cases: dict[str, Any] = {
        "accumulation": lambda: build(optimizer=adam(gradient_accumulation_steps=2)),
        "overwriting": lambda: build(optimizer=adam(use_ema=True, ema_overwrite_frequency=2)),
        "scale": lambda: build(optimizer=keras.optimizers.LossScaleOptimizer(adam())),
        "eager": lambda: build(run_eagerly=True),
        "xla": lambda: build(jit_compile=True),
        "constraint": lambda: build(keras.layers.Dense(2, kernel_constraint="non_neg")),
        "stateful": stateful,
    }
    found = {name: _error(name, make, X, Y, batch_size=BATCH) for name, make in cases.items()}
    generator = ((X[:16], Y[:16]) for _ in range(100))
    found["generator"] = _error("generator", build, generator)
    endless = tf.data.Dataset.from_tensors((X, Y)).repeat()
    found["endless"] = _error("endless", build, endless, steps_per_epoch=None)
    with kd.init().scope():
        model = build()
    try:
        model.fit(X, Y, verbose=0)
    except DistplugError as error:
        found["plain"] = f"{type(error).__name__}: {error}"
    try:
        fit("on_batch", model, X, Y, batch_size=BATCH, epochs=1)
        model.train_on_batch(X, Y)  # would otherwise train on the data of `fit`
    except DistplugError as error:
        found["on_batch"] = f"{type(error).__name__}: {error}"
    return found


def _error(name: str, *given: Any, **options: Any) -> str:
    try:
        fit(name, *given, **options)
    except DistplugError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def averages() -> dict[str, Any]:
    """Moving averages of the weights, which the model has at the end."""

    def built() -> keras.Model:
        return build(optimizer=keras.optimizers.SGD(0.0, use_ema=True))

    before = build().get_weights()
    model = fit("averages", built, X, Y, batch_size=BATCH).model
    return {
        "apart": max(
            float(np.abs(a - b).max()) for a, b in zip(before, model.get_weights(), strict=True)
        )
    }


WORDS, WIDTH = 101, 4
SPLIT = {"min_shard_bytes": 1000}  # the table has 1616
TOKENS = rng.integers(0, WORDS, size=(320, 5))
FEW = ((TOKENS % 10 < 3).sum(1) > 1).astype("float32")


def reader(
    optimizer: Any = "adam", *, built: bool = True, steps_per_execution: int = 1, **of_table: Any
) -> keras.Model:
    """A model with a table."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            *([keras.layers.Input((5,), dtype="int32")] if built else []),
            keras.layers.Embedding(WORDS, WIDTH, name="words", **of_table),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(optimizer, loss, steps_per_execution=steps_per_execution)
    return model


def values(model: keras.Model) -> list[np.ndarray]:
    return [
        np.asarray(each) for each in merge_parts([*model.variables, *model.optimizer.variables])
    ]


def apart(these: Any, others: Any) -> float:
    pairs = zip(these, others, strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


def read_by(model: keras.Model) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the gradient rows of tables, and the shapes of variables that are read as a whole."""
    weights = [each for each in model.trainable_variables if "words" in each.path]

    @tf.function
    def slopes() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(np.array([[0, 1, 50, 51, -1]])))
        return tape.gradient(loss, [part.value for part in weights])

    function = slopes.get_concrete_function()
    shapes = sorted(
        each.outputs[0].shape.as_list()
        for each in function.graph.get_operations()
        if each.type == "ReadVariableOp"
    )
    return [np.asarray(each.indices).tolist() for each in function()], shapes


def tables() -> dict[str, Any]:
    """Trains models with a split table on one worker, step by step, and in a single process."""

    def same_batch(context: Any = None) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors((TOKENS[:64], FEW[:64])).repeat()

    kd.init()
    found: dict[str, Any] = {}
    for kind, config, of_table in (
        (keras.optimizers.SGD, {"learning_rate": 1.0}, {}),
        (keras.optimizers.AdamW, {"global_clipnorm": 0.1}, {"embeddings_regularizer": "l2"}),
    ):
        alone, trained = (
            reader(kind(**config), steps_per_execution=STEPS, **of_table) for _ in range(2)
        )
        first = alone.get_weights()
        alone.fit(same_batch(), steps_per_epoch=STEPS, verbose=0)
        backup = kd.BackupAndRestore(FOLDER / kind.__name__, delete_checkpoint=False)
        given = {"directory": None, "callbacks": [backup], **SPLIT}
        model = fit("", trained, same_batch, **given).model
        found[kind.__name__] = {
            "learned": apart(first, alone.get_weights()),
            "trained": apart(values(alone), values(trained)),
            "model": apart(values(alone), values(model)),
            "weights": apart(alone.get_weights(), model.get_weights()),
            "predict": apart(*(m.predict(TOKENS, verbose=0) for m in (alone, model))),
            "evaluate": abs(
                alone.evaluate(TOKENS, FEW, verbose=0) - model.evaluate(TOKENS, FEW, verbose=0)
            ),
        }
    model.save(FOLDER / "saved.keras")
    model.save_weights(FOLDER / "saved.weights.h5")
    backup.export(FOLDER / "exported.keras")
    for name in ("saved", "exported"):
        again = keras.models.load_model(FOLDER / f"{name}.keras")
        found[name] = apart(values(alone), values(again))
    model.set_weights(first)
    found["set"] = apart(first, model.get_weights())
    model.optimizer.variables[2].assign_add(tf.ones_like(model.optimizer.variables[2]))
    model.load_weights(FOLDER / "saved.weights.h5")
    found["loaded"] = apart(values(alone), values(model))
    # For a layer that shares the table.
    found["shared"] = apart([tf.convert_to_tensor(model.layers[0].embeddings)], values(alone)[:1])

    found["read"] = read_by(model)
    weights = [each for each in model.trainable_variables if "words" in each.path]
    slots = [each for each in model.optimizer.variables if "words" in each.path]

    for name, those in (("weights", weights), ("slots", slots)):
        found[name] = [
            (each.shape[0], tf.DeviceSpec.from_string(each.value.device).task) for each in those
        ]
    return found


def tables_of_workers() -> dict[str, Any]:
    """Two workers, a label with NaN, and checkpoints between split and whole tables.

    No model is built before it has a batch or a checkpoint.
    """

    class Begins(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.values = values(self.model)

    labels = np.where(np.arange(320) == 3, np.nan, FEW)
    names = ("steps", "left_out", "parts", "loss", "apart", "read")
    found: dict[str, Any] = {name: [] for name in names}
    ended: list[np.ndarray] = []
    for epochs, given in ((1, SPLIT), (2, {}), (3, SPLIT)):
        opening.finished_here.clear()  # as in another process
        told: list[Any] = []
        callbacks = [
            kd.NaNWatchdog(max_skips=20, on_fault=told.append),
            keras.callbacks.EarlyStopping("val_loss", patience=9, restore_best_weights=True),
            begins := Begins(),
        ]
        model = fit(
            "tables_of_workers",
            lambda: reader(keras.optimizers.Adam(0.02), built=False),
            TOKENS,
            labels,
            batch_size=BATCH,
            epochs=epochs,
            validation_data=(TOKENS, FEW),
            callbacks=callbacks,
            **given,
        ).model
        if ended:
            found["apart"].append(apart(ended, begins.values))
        ended = values(model)
        found["steps"].append(steps_of(model))
        found["left_out"].append(len(told))
        found["read"].append(read_by(model))
        found["parts"].append(sum("words" in v.path for v in model.variables))
        found["loss"].append(model.evaluate(TOKENS, FEW, verbose=0))
    return found


def tables_refused() -> dict[str, Any]:
    """Returns the errors for tables that cannot be split."""
    strategy = kd.init()
    orthogonal = keras.regularizers.OrthogonalRegularizer()
    cases: dict[str, Any] = {
        "clipnorm": lambda: reader(keras.optimizers.Adam(clipnorm=1.0)),
        "adafactor": lambda: reader("adafactor"),
        "lora": lambda: reader(lora_rank=2),
        "regularizer": lambda: reader(embeddings_regularizer=orthogonal),
        "constraint": lambda: reader(embeddings_constraint="non_neg"),
    }
    found = {name: _error(name, make, TOKENS, FEW, **SPLIT) for name, make in cases.items()}
    found["size"] = _error("size", reader, TOKENS, FEW, min_shard_bytes=0)
    with strategy.scope():
        made = reader()
    found["made"] = _error("made", made, TOKENS, FEW, **SPLIT)
    # The constructor sets it, and a process can have only one such strategy.
    strategy.extended._variable_partitioner = (
        tf.distribute.experimental.partitioners.MinSizePartitioner(1000, SERVERS)
    )
    found["partitioner"] = _error("partitioner", reader, TOKENS, FEW)
    strategy.extended._variable_partitioner = None
    return found


CASES = (
    counts,
    executions,
    messages,
    learned,
    validated,
    own_model,
    own_fit,
    of_context,
    not_finite,
    only_nan,
    resumed_fit,
    refused,
    averages,
    tables,
    tables_of_workers,
    tables_refused,
)
NAMES = [case.__name__ for case in CASES]


def main() -> None:
    found = {case.__name__: case() for case in CASES if case.__name__ in (sys.argv[2:] or NAMES)}
    (FOLDER / "found.json").write_text(json.dumps(found, indent=1, default=float))
    sys.stdout.flush()
    os._exit(0)  # the servers themselves never exit


if __name__ == "__main__":
    main()
