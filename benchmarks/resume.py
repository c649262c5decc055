"""The cost of resuming in the middle of the data, and of being able to.

    python benchmarks/resume.py [--batch 10000] [--rounds 5] [--json FILE]

Three parts, each interleaved, with medians and their spread:

- seek: the time from the data source of a script to its first batch, at the start and at batch
  `--batch` of the third pass: arrays, a `PyDataset`, and a tf.data pipeline with `shuffle(10_000,
  seed=1)` and a map, which also shows the time to fill its buffer; and the time to read that many
  batches;
- step: the time to read a batch of arrays, compared with Keras' own adapter, and its CPU time;
- place: the time for `fit` to track its position in every step, and to add the position to the
  state of a checkpoint, compared with the references to the model's variables, which every
  checkpoint needs.

Not verified on GPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers import data_adapters
from measured import format_spread, parser, report, show, spread
from rich.table import Table

import keras_distplug as kd
from keras_distplug.checkpoint import capture
from keras_distplug.checkpoint.fit_state import FitState
from keras_distplug.cluster.agreement import alone
from keras_distplug.cluster.roles import single_process

BATCH_SIZE, FEATURES, BUFFER = 32, 32, 10_000
PASSED = 2


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        super().__init__()
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x) // BATCH_SIZE

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(BATCH_SIZE * index, BATCH_SIZE * (index + 1))
        return self.x[rows], self.y[rows]


def pipeline(samples: int) -> tf.data.Dataset:
    def sample(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        x = tf.random.stateless_normal([FEATURES], tf.stack([number, 1]))
        return x, tf.reduce_sum(x, keepdims=True)

    dataset = tf.data.Dataset.range(samples).map(sample, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.shuffle(BUFFER, seed=1).batch(BATCH_SIZE)


def first_batch_s(make: Callable[[], dict[str, Any]], start: int) -> float:
    positioned = kd.resumable(**make()).get_tf_dataset()
    begin = time.perf_counter()
    positioned.begin_at(PASSED, start)
    next(iter(positioned))
    return time.perf_counter() - begin


def read_over_s(make: Callable[[], dict[str, Any]], batches: int) -> float:
    data = iter(kd.resumable(**make()).get_tf_dataset())
    begin = time.perf_counter()
    for _ in range(batches):
        next(data)
    return time.perf_counter() - begin


def measure_seek(rounds: int, batch: int) -> dict[str, dict[str, Any]]:
    samples = (batch + 100) * BATCH_SIZE
    rng = np.random.default_rng(0)
    x = rng.normal(size=(samples, FEATURES)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    makes: dict[str, Callable[[], dict[str, Any]]] = {
        "arrays": lambda: {"x": x, "y": y, "batch_size": BATCH_SIZE},
        "PyDataset": lambda: {"x": Batches(x, y)},
        "tf.data, shuffle and map": lambda: {"x": pipeline(samples)},
    }
    taken: dict[str, dict[str, list[float]]] = {name: {} for name in makes}
    for number in range(-1, rounds):  # the first round warms up
        names = list(makes)
        for name in names if number % 2 else reversed(names):
            found = {
                "start_s": first_batch_s(makes[name], 0),
                "seek_s": first_batch_s(makes[name], batch),
            }
            if number == 0:
                found["read_over_s"] = read_over_s(makes[name], batch)
            for what, value in found.items() if number >= 0 else ():
                taken[name].setdefault(what, []).append(value)
    return {
        name: {what: spread(values) for what, values in each.items()}
        for name, each in taken.items()
    }


def measure_step(rounds: int) -> dict[str, dict[str, Any]]:
    samples = 60_000
    x = np.random.default_rng(0).normal(size=(samples, FEATURES)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    keras_own = data_adapters.get_data_adapter(x, y, batch_size=BATCH_SIZE, shuffle=True)
    subjects: dict[str, Any] = {
        "keras_distplug": kd.resumable(x, y, batch_size=BATCH_SIZE).get_tf_dataset(),
        "Keras' own": keras_own.get_tf_dataset(),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in subjects}
    for number in range(-1, rounds):
        names = list(subjects)
        for name in names if number % 2 else reversed(names):
            start_s, worked_s = time.perf_counter(), time.process_time()
            batches = sum(1 for _ in subjects[name])
            found = (time.perf_counter() - start_s, time.process_time() - worked_s)
            taken[name] += [tuple(each / batches for each in found)] if number >= 0 else []
    return {
        name: {
            "step_s": spread(step for step, _ in each),
            "worked_s": spread(worked for _, worked in each),
        }
        for name, each in taken.items()
    }


class Place(keras.callbacks.Callback):  # type: ignore[misc]
    """Counts and gets the state in every step, like `BackupAndRestore` with `save_freq=1`."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[tuple[float, float, float]] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.state = FitState(self.model, [], single_process(), alone(), seed=1)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.state.on_epoch_begin(epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        moments = [time.perf_counter()]
        self.state.on_train_batch_end(batch, self.params["steps"])
        moments.append(time.perf_counter())
        self.state.take(logs)
        moments.append(time.perf_counter())
        capture.capture(self.model)
        moments.append(time.perf_counter())
        count_s, take_s, variables_s = (b - a for a, b in pairwise(moments))
        self.taken.append((count_s, take_s - variables_s, variables_s))


def measure_place(rounds: int) -> dict[str, dict[str, Any]]:
    samples = 100 * BATCH_SIZE
    x = np.random.default_rng(0).normal(size=(samples, FEATURES)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    makes: dict[str, Callable[[], dict[str, Any]]] = {
        "arrays": lambda: {"x": x, "y": y, "batch_size": BATCH_SIZE},
        "PyDataset": lambda: {"x": Batches(x, y)},
        "tf.data, shuffle and map": lambda: {"x": pipeline(samples)},
    }
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in makes}
    for number in range(-1, rounds):
        names = list(makes)
        for name in names if number % 2 else reversed(names):
            model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
            model.compile("adam", "mse", metrics=["mae"])
            place = Place()
            model.fit(kd.resumable(**makes[name]()), epochs=1, verbose=0, callbacks=[place])
            taken[name] += place.taken[1:] if number >= 0 else []
    parts = ("count_s", "place_s", "variables_s")
    return {
        name: dict(zip(parts, map(spread, zip(*each, strict=True)), strict=True))
        for name, each in taken.items()
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--batch", type=int, default=10_000, help="the batch to resume at")
    options.add_argument("--rounds", type=int, default=5)
    arguments = options.parse_args()
    found = {
        "seek": measure_seek(arguments.rounds, arguments.batch),
        "step": measure_step(arguments.rounds),
        "place": measure_place(arguments.rounds),
    }
    seek = Table(
        "source", "first batch, median (range)", f"batch {arguments.batch}", "read over to it"
    )
    for name, each in found["seek"].items():
        seek.add_row(name, *(format_spread(one, ".3f", unit=" s") for one in each.values()))
    step = Table("arrays of", "a batch, median (range)", "processors")
    for name, each in found["step"].items():
        step.add_row(name, *(format_spread(one, ".0f", 1e6, " us") for one in each.values()))
    place = Table("place in", "count a step, median (quartiles)", "into a checkpoint", "variables")
    for name, each in found["place"].items():
        place.add_row(
            name, *(format_spread(one, ".0f", 1e6, " us", quartiles=True) for one in each.values())
        )
    show(seek, step, place)
    report(arguments, found)


if __name__ == "__main__":
    main()
