"""A process of a job of `benchmarks/parameter_server.py`: `serving.py WHAT FOLDER STEPS TIMES`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# Under a supervisor, a worker never returns from importing the package.
print(f"pid {os.getpid()}", flush=True)

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import keras_distplug as kd  # noqa: E402

what, folder = sys.argv[1], Path(sys.argv[2])
steps, times = map(int, sys.argv[3:])
strategy = kd.init()  # does not return on a worker or parameter server


def digits() -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x / 16).astype("float32").reshape(-1, 8, 8, 1)[order], y.astype("int32")[order]
    return (x[:1500], y[:1500]), (x[1500:], y[1500:])


def build(seed: int, width: int = 32) -> keras.Model:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(width, 3, activation="relu"),
            keras.layers.Conv2D(width, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(), loss, metrics=["accuracy"])
    return model


def fit(model: Any, epochs: int, name: str, *callbacks: keras.callbacks.Callback) -> Any:
    return kd.distributed_fit(
        model,
        *digits()[0],
        batch_size=64,
        epochs=epochs,
        steps_per_epoch=steps,
        verbose=0,
        callbacks=list(callbacks),
        directory=folder / name,
    ).model


class Timed(keras.callbacks.Callback):
    """Records the steps per second of all epochs except the first, in which a step is traced."""

    def __init__(self, between: Any) -> None:
        self.rates: list[float] = []
        self._between = between

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._start_s = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.rates.append(steps / (time.perf_counter() - self._start_s))
        self._between()


def throughput() -> list[list[float]]:
    loop = by_hand()
    theirs: list[float] = []
    timed = Timed(lambda: theirs.append(loop()))
    fit(lambda: build(0), times + 1, "run", timed)
    return [list(pair) for pair in zip(timed.rates[1:], theirs[1:], strict=True)]


def by_hand() -> Any:
    """Returns a function that trains for one epoch and returns the steps per second."""
    x, y = digits()[0]
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = build(0)
        model.optimizer.build(model.trainable_variables)
        total, count = (tf.Variable(0.0) for _ in range(2))
        right = tf.Variable(0.0)

    def data() -> tf.data.Dataset:
        made = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).batch(64)
        return made.repeat().prefetch(tf.data.AUTOTUNE)

    def replica(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = model.loss(y, outputs)
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables))
        hits = tf.equal(tf.argmax(outputs, 1, tf.int32), y)
        total.assign_add(loss * 64)
        count.assign_add(64)
        right.assign_add(tf.reduce_sum(tf.cast(hits, tf.float32)))

    @tf.function
    def step(iterator: Any) -> None:
        strategy.run(replica, args=next(iterator))

    iterator = iter(coordinator.create_per_worker_dataset(data))

    def loop() -> float:
        start_s = time.perf_counter()
        for _ in range(steps):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()
        return steps / (time.perf_counter() - start_s)

    return loop


def accuracy() -> list[list[float]]:
    found = []
    for seed in range(times):
        parts = fit(lambda seed=seed: build(seed), 1, f"seed-{seed}")
        alone = build(seed)
        x, y = digits()[0]
        data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).batch(64).repeat()
        alone.fit(data, steps_per_epoch=steps, verbose=0)
        found.append([each.evaluate(*digits()[1], verbose=0)[1] for each in (parts, alone)])
    return found


class Begun(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        (folder / "started").touch()


def kills() -> list[int]:
    model = fit(lambda: build(0), 1, "run", Begun())
    return [int(keras.ops.convert_to_numpy(model.optimizer.iterations))]


(folder / "found.json").write_text(json.dumps(globals()[what]()))
