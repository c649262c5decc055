"""A worker of `benchmarks/scaling.py`: `scaled.py WAY MODEL BATCH REPLICAS STEPS FILE`, with the
batch size per replica, and the number of replicas in this process. The chief writes the samples per
second of all replicas."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

way, model_name = sys.argv[1:3]
batch, replicas, steps = map(int, sys.argv[3:6])
file = Path(sys.argv[6])
config = json.loads(os.environ.get("TF_CONFIG", "{}"))
workers = len(config["cluster"]["worker"]) if config else 1
rank = config["task"]["index"] if config else 0
# One core per replica, for all threads of its process. TensorFlow counts the available cores when
# it is loaded.
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, cores[replicas * rank : replicas * (rank + 1)])

import keras  # noqa: E402
import models  # noqa: E402
import tensorflow as tf  # noqa: E402

WARM_UP = 20  # steps that do not count
build: Callable[[], keras.Model] = getattr(models, model_name)
global_batch = batch * replicas * workers


class Clock(keras.callbacks.Callback):  # type: ignore[misc]
    """Measures the time from the end of the warm-up's last step to the end of the last step."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch + 1 == WARM_UP:
            self._start_s = time.perf_counter()
        if batch + 1 == WARM_UP + steps:
            self.seconds = time.perf_counter() - self._start_s


def strategy() -> tf.distribute.Strategy:
    if workers > 1:
        return tf.distribute.MultiWorkerMirroredStrategy()
    if replicas > 1:
        return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    return tf.distribute.get_strategy()


def ours() -> float:
    """Fits one epoch with `defaults()`: a checkpoint is written after the clock has stopped."""
    import keras_distplug as kd

    chosen = kd.init() if workers > 1 else strategy()
    model = model_in(chosen)
    clock = Clock()
    kd.distributed_fit(
        model,
        data_for(model),
        verbose=0,
        callbacks=[clock],
        strategy=chosen,
        directory=file.parent / "run",
    )
    return clock.seconds


def keras_fit() -> float:
    model = model_in(strategy())
    clock = Clock()
    model.fit(data_for(model), verbose=0, callbacks=[clock])
    return clock.seconds


def data_for(model: keras.Model) -> tf.data.Dataset:
    """Returns a finite dataset, as in most scripts: several workers must agree on its end."""
    return models.one_batch_for(model, global_batch).take(WARM_UP + steps)


def model_in(chosen: tf.distribute.Strategy) -> keras.Model:
    keras.utils.set_random_seed(0)
    with chosen.scope():
        return build()


def by_hand() -> float:
    """Runs the loop of TensorFlow's guides, with the same loss, metric, optimizer and batches."""
    chosen = strategy()
    model = model_in(chosen)
    with chosen.scope():
        model.optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    def replica(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = loss_of(y, outputs) / global_batch
        weights = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, weights), weights)
        right = keras.metrics.sparse_categorical_accuracy(y, outputs)
        return tf.stack([loss, tf.reduce_sum(right) / global_batch])

    @tf.function
    def step(batches: Any) -> tf.Tensor:
        told = chosen.run(replica, args=next(batches))
        return chosen.reduce(tf.distribute.ReduceOp.SUM, told, axis=None)

    batches = iter(chosen.experimental_distribute_dataset(data_for(model)))

    def loop(count: int) -> None:
        for _ in range(count):
            step(batches).numpy()

    loop(WARM_UP)
    start_s = time.perf_counter()
    loop(steps)
    return time.perf_counter() - start_s


if replicas > 1:
    cpu = tf.config.list_physical_devices("CPU")[0]
    each = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [each] * replicas)
taken_s = {"ours": ours, "by_hand": by_hand, "keras": keras_fit}[way]()
if rank == 0:
    file.write_text(json.dumps(global_batch * steps / taken_s))
