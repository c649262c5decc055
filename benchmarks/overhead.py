"""What the callbacks of `defaults()` cost a step that goes well.

    python benchmarks/overhead.py [--pairs 30] [--steps 40] [--json FILE]
    keras-distplug run --workers 2 -- python benchmarks/overhead.py [--pairs 30] [--steps 40]

A `fit` with `defaults()` in full and one without any callback take turns, in one process, with a
model each; on one device and on two mirrored logical CPU devices. Counted is the time from the
first to the last batch of a `fit`; a pair's ratio is that of two that came one after the other.
Steps take 20 ms and more. For each callback alone: `--each`. On several workers, plain Keras does
not train; there, the `fit` without a callback is one of an adapted model. Not verified on GPU.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

import keras_distplug as kd
from keras_distplug.cluster import agreement, roles

IS_CLUSTER = "TF_CONFIG" in os.environ
WARM_UP = 2  # pairs that do not count
Callbacks = Callable[[Path], list[keras.callbacks.Callback]]


class Clock(keras.callbacks.Callback):
    """Says how long it is from the end of the first batch to that of the last."""

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self.ends_s: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self.ends_s.append(time.perf_counter())

    @property
    def seconds_a_step(self) -> float:
        return (self.ends_s[-1] - self.ends_s[0]) / (len(self.ends_s) - 1)


def perceptron() -> keras.Model:
    layers = keras.layers
    hidden = (layers.Dense(1024, activation="relu") for _ in range(3))
    return compiled(keras.Sequential([keras.Input((512,)), *hidden, layers.Dense(10)]))


def convolutional() -> keras.Model:
    layers = keras.layers
    hidden: list[keras.Layer] = []
    for filters in (16, 32, 32):
        hidden += [
            layers.Conv2D(filters, 3, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
        ]
    return compiled(
        keras.Sequential([keras.Input((32, 32, 3)), *hidden, layers.Flatten(), layers.Dense(10)])
    )


def compiled(model: keras.Model) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


MODELS = {
    "perceptron, 2.6 M weights, batch 256": (perceptron, 256),
    "convolutions, batch 128": (convolutional, 128),
}


def data_for(model: keras.Model, batch: int) -> tf.data.Dataset:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch, *model.input_shape[1:])).astype("float32")
    return tf.data.Dataset.from_tensors((x, rng.integers(0, 10, batch))).repeat()


@contextmanager
def shared_folder() -> Iterator[str]:
    """One that all workers have, and the chief deletes."""
    role = roles.from_environment(os.environ)
    workers = agreement.among(role)
    with ExitStack() as stack:
        made = stack.enter_context(tempfile.TemporaryDirectory()) if role.is_chief else None
        yield workers.from_chief("folder", made)
        workers.barrier("folder")


def measure(
    name: str, strategy: tf.distribute.Strategy, callbacks: Callbacks, pairs: int, steps: int
) -> dict[str, float]:
    build, batch = MODELS[name]
    models = {}
    for kind in ("bare", "ours"):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            models[kind] = build()
        if IS_CLUSTER:
            kd.adapt(models[kind])
    data = data_for(models["bare"], batch)
    taken: dict[str, list[float]] = {kind: [] for kind in models}
    with shared_folder() as folder:
        for number in range(WARM_UP + pairs):
            for kind in sorted(models, reverse=bool(number % 2)):
                clock = Clock()
                ours = callbacks(Path(folder) / str(number)) if kind == "ours" else []
                models[kind].fit(data, steps_per_epoch=steps, verbose=0, callbacks=[*ours, clock])
                taken[kind].append(clock.seconds_a_step)
    bare, ours = (taken[kind][WARM_UP:] for kind in ("bare", "ours"))
    ratios = [b / a for a, b in zip(bare, ours, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "bare_ms": 1000 * statistics.median(bare),
        "ours_ms": 1000 * statistics.median(ours),
        "ratio": statistics.median(ratios),
        "ratio_first_quartile": low,
        "ratio_third_quartile": high,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--steps", type=int, default=40, help="of each fit")
    parser.add_argument("--each", action="store_true", help="each callback alone, too")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    arguments = parser.parse_args()
    logging.getLogger("keras_distplug").setLevel(logging.WARNING)
    strategies: dict[str, Callable[[], tf.distribute.Strategy]] = {
        "one device": tf.distribute.get_strategy,
        "two mirrored": lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
    }
    if IS_CLUSTER:
        cluster = kd.init()
        strategies = {"several workers": lambda: cluster}
    else:
        cpu = tf.config.list_physical_devices("CPU")[0]
        each = tf.config.LogicalDeviceConfiguration()
        tf.config.set_logical_device_configuration(cpu, [each] * 2)
    sets: dict[str, Callbacks] = {"defaults()": lambda folder: kd.defaults(folder)}
    if arguments.each:
        sets |= {
            "NaNWatchdog": lambda folder: [kd.NaNWatchdog()],
            "StragglerWatchdog": lambda folder: [kd.StragglerWatchdog()],
            "ReplicaMetrics": lambda folder: [kd.ReplicaMetrics(folder)],
            "HangWatchdog": lambda folder: [kd.HangWatchdog()],
            "BackupAndRestore": lambda folder: [kd.BackupAndRestore(folder)],
        }
    table = Table(title="Time of a step")
    for heading in ("strategy", "model", "callbacks", "bare", "with them", "ratio", "quartiles"):
        table.add_column(heading)
    found = {}
    for strategy, make in strategies.items():
        made = make()  # of several in one process, plain Keras mixes up the collectives
        for name in MODELS:
            for which, callbacks in sets.items():
                one = measure(name, made, callbacks, arguments.pairs, arguments.steps)
                found[f"{strategy}, {name}, {which}"] = one
                print(f"{strategy}, {name}, {which}: {one}", flush=True)
                table.add_row(
                    strategy,
                    name,
                    which,
                    f"{one['bare_ms']:.1f} ms",
                    f"{one['ours_ms']:.1f} ms",
                    f"{one['ratio']:.3f}",
                    f"{one['ratio_first_quartile']:.3f} to {one['ratio_third_quartile']:.3f}",
                )
    if not roles.from_environment(os.environ).is_chief:
        return
    Console(width=140).print(table)
    machine = {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
    }
    print(json.dumps(machine))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, "cases": found}, indent=2))


if __name__ == "__main__":
    main()
