"""The overhead of the callbacks of `defaults()` in a step without faults.

    python benchmarks/overhead.py [--pairs 30] [--steps 40] [--json FILE]
    keras-distplug run --workers 2 -- python benchmarks/overhead.py [--pairs 30] [--steps 40]

A `fit` with all of `defaults()` and one without any callback take turns, in one process, with a
separate model each; on one device and on two mirrored logical CPU devices. The measured time is
that from the first to the last batch of a `fit`; the ratio of a pair is that of two consecutive
fits. Steps take 20 ms and more. To also measure every callback alone, pass `--each`. Plain Keras
does not train on several workers; there, the `fit` without callbacks is one of an adapted model.
Not verified on GPU.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf
from measured import format_spread, parser, report, show, spread
from rich.table import Table
from workers.models import convolutional, one_batch_for, perceptron

import keras_distplug as kd
from keras_distplug.cluster import agreement, roles

IS_CLUSTER = "TF_CONFIG" in os.environ
WARM_UP = 2  # pairs that do not count
TIMES = ("bare_s", "ours_s")
Callbacks = Callable[[Path], list[keras.callbacks.Callback]]


class Clock(keras.callbacks.Callback):
    """Measures the time from the end of the first batch to the end of the last one."""

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self.ends_s: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self.ends_s.append(time.perf_counter())

    @property
    def seconds_a_step(self) -> float:
        return (self.ends_s[-1] - self.ends_s[0]) / (len(self.ends_s) - 1)


MODELS = {
    "perceptron, 2.6 M weights, batch 256": (perceptron, 256),
    "convolutions, batch 128": (
        partial(convolutional, keras.layers.BatchNormalization),
        128,
    ),
}


@contextmanager
def shared_folder() -> Iterator[str]:
    """Yields a folder that all workers share and the chief deletes."""
    role = roles.from_environment(os.environ)
    workers = agreement.get_channel(role)
    with ExitStack() as stack:
        made = stack.enter_context(tempfile.TemporaryDirectory()) if role.is_chief else None
        yield workers.broadcast("folder", made)
        workers.barrier("folder")


def measure(
    name: str, strategy: tf.distribute.Strategy, callbacks: Callbacks, pairs: int, steps: int
) -> dict[str, Any]:
    build, batch = MODELS[name]
    models = {}
    for kind in ("bare", "ours"):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            models[kind] = build()
        if IS_CLUSTER:
            kd.adapt(models[kind])
    data = one_batch_for(models["bare"], batch)
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
    return {"bare_s": spread(bare), "ours_s": spread(ours), "ratio": spread(ratios)}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--pairs", type=int, default=30)
    options.add_argument("--steps", type=int, default=40, help="steps per fit")
    options.add_argument("--each", action="store_true", help="also measure every callback alone")
    arguments = options.parse_args()
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
    table = Table(title="Time of a step: median (quartiles)")
    for heading in ("strategy", "model", "callbacks", "bare", "with them", "ratio of a pair"):
        table.add_column(heading)
    found = {}
    for strategy, make in strategies.items():
        made = make()  # of several in one process, plain Keras mixes up the collectives
        for name in MODELS:
            for which, callbacks in sets.items():
                one = measure(name, made, callbacks, arguments.pairs, arguments.steps)
                found[f"{strategy}, {name}, {which}"] = one
                table.add_row(
                    strategy,
                    name,
                    which,
                    *(
                        format_spread(one[kind], ".1f", 1000, " ms", quartiles=True)
                        for kind in TIMES
                    ),
                    format_spread(one["ratio"], ".3f", quartiles=True),
                )
    if roles.from_environment(os.environ).is_chief:
        show(table)
        report(arguments, found)


if __name__ == "__main__":
    main()
