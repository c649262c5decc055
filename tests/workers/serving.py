"""Trains under ParameterServerStrategy with all servers in this process, and tells what came out.

    python serving.py FOLDER [CASE...]

Writes FOLDER/found.json. TensorFlow forms a cluster once in a process, hence all cases in one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from support.cluster import free_ports

WORKERS = 2
STEPS, BATCH = 40, 16


def serve() -> list[tf.distribute.Server]:
    """Workers and a parameter server beside the chief, who finds them in TF_CONFIG."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2 + WORKERS)]
    cluster = {"chief": addresses[:1], "worker": addresses[1:-1], "ps": addresses[-1:]}
    # They share the threads of this process, of which each keeps one while it waits.
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
    """What the optimizer and three kinds of metrics have counted in an epoch."""
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
    """Several steps at once."""
    model = fit("executions", lambda: build(steps_per_execution=5), X, Y, batch_size=BATCH).model
    return {"steps": steps_of(model), "loss": float(value(model.metrics[0], "count"))}


def learned() -> dict[str, Any]:
    """Training, validation, and what the methods of Keras make of the trained model."""
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


def own_model() -> dict[str, Any]:
    """A model made outside the scope holds what was learned, also in `fit` with `resumable`."""
    model = build()
    fit("own", model, X, Y, batch_size=BATCH)
    with kd.init().scope():
        placed = build()
    placed.fit(
        kd.resumable(X, Y, batch_size=BATCH), verbose=0, callbacks=kd.defaults(FOLDER / "plain")
    )
    return {"steps": steps_of(model), "plain": steps_of(placed)}


def of_context() -> dict[str, Any]:
    """Workers get what a function makes for their own `InputContext`."""

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
    """Batches with NaN are left out of weights, statistics and metrics."""
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


def goes_on() -> dict[str, Any]:
    """A `fit` that an error ends in the middle of its second epoch, and the one behind it."""

    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if len(self.model.history.epoch) == 1 and batch == 25:
                raise KeyError("on purpose")

    class Counts(keras.callbacks.Callback):
        def __init__(self) -> None:
            self.batches: list[int] = []
            self.began: int | None = None

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if self.began is None:
                self.began = steps_of(self.model)
            self.batches.append(batch)

    def backup() -> keras.callbacks.Callback:
        return kd.BackupAndRestore(
            FOLDER / "goes_on", save_freq=10, delete_checkpoint=False, on_busy="wait"
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
    model.layers[2].stateful = True  # before a model is built, Keras asks for batches of one size
    return model


def refused() -> dict[str, Any]:
    """The error for what cannot be right."""
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
    return found


def _error(name: str, *given: Any, **options: Any) -> str:
    try:
        fit(name, *given, **options)
    except DistplugError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def averages() -> dict[str, Any]:
    """Moving averages of the weights, which the model has in the end."""

    def built() -> keras.Model:
        return build(optimizer=keras.optimizers.SGD(0.0, use_ema=True))

    before = build().get_weights()
    model = fit("averages", built, X, Y, batch_size=BATCH).model
    return {
        "apart": max(
            float(np.abs(a - b).max()) for a, b in zip(before, model.get_weights(), strict=True)
        )
    }


CASES = (
    counts,
    executions,
    learned,
    own_model,
    of_context,
    not_finite,
    only_nan,
    goes_on,
    refused,
    averages,
)
NAMES = [case.__name__ for case in CASES]


def main() -> None:
    found = {case.__name__: case() for case in CASES if case.__name__ in (sys.argv[2:] or NAMES)}
    (FOLDER / "found.json").write_text(json.dumps(found, indent=1, default=float))
    sys.stdout.flush()
    os._exit(0)  # the servers' own end never comes


if __name__ == "__main__":
    main()
