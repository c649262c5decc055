"""What being right costs: step time of an adapted model over that of plain Keras.

    python benchmarks/strategies.py [--rounds 40] [--json FILE]

MirroredStrategy over two logical CPU devices, on work that plain Keras gets right, too: even
batches, no clipping, no dropout. Where the dataset does not say that all batches are even, the
adapted model looks at each before its step. Both models take turns, three steps (or one evaluate or
predict of eight batches) each, in one process; the ratio is that of the medians, its spread that of
the rounds. Not verified on GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

import keras_distplug as kd

STEPS_A_TURN = 3
BATCHES = 8  # of an evaluate or predict
Build = Callable[[], keras.Model]


def perceptron() -> keras.Model:
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((512,)),
            *(layers.Dense(1024, activation="relu") for _ in range(3)),
            layers.Dense(10),
        ]
    )
    return compiled(model)


def convolutional(*, normalized: bool) -> keras.Model:
    layers = keras.layers
    hidden: list[keras.Layer] = []
    for filters in (16, 32, 32):
        hidden.append(layers.Conv2D(filters, 3, padding="same"))
        if normalized:
            hidden.append(layers.BatchNormalization(synchronized=True))
        hidden += [layers.ReLU(), layers.MaxPooling2D()]
    return compiled(
        keras.Sequential([keras.Input((32, 32, 3)), *hidden, layers.Flatten(), layers.Dense(10)])
    )


def compiled(model: keras.Model) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


@dataclass(frozen=True)
class Case:
    build: Build
    batch: int
    is_even: bool = True  # the dataset says so; it is so in any case
    use: str = "fit"


CASES = {
    "perceptron, 2.6 M weights": Case(perceptron, 256),
    "convolutions": Case(lambda: convolutional(normalized=False), 128),
    "convolutions, BatchNormalization": Case(lambda: convolutional(normalized=True), 128),
    "convolutions, perhaps uneven": Case(lambda: convolutional(normalized=False), 128, False),
    "the same, large batches": Case(lambda: convolutional(normalized=False), 512, False),
    "the same, evaluate": Case(lambda: convolutional(normalized=False), 512, False, "evaluate"),
    "the same, predict": Case(lambda: convolutional(normalized=False), 512, False, "predict"),
}


def turn_of(case: Case, strategy: tf.distribute.Strategy, *, adapted: bool) -> Callable[[], None]:
    """A function that takes a few training steps, or evaluates, or predicts."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = case.build()
    if adapted:
        kd.adapt(model)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(case.batch, *model.input_shape[1:])).astype("float32")
    data = tf.data.Dataset.from_tensors((x, rng.integers(0, 10, case.batch))).repeat()
    if not case.is_even:
        data = data.map(lambda x, y: (without_batch_size(x), without_batch_size(y)))
    if case.use != "fit":
        return lambda: getattr(model, case.use)(data.take(BATCHES), verbose=0)
    model.fit(data, steps_per_epoch=3, verbose=0)
    batches = iter(strategy.experimental_distribute_dataset(data))

    def steps() -> None:
        for _ in range(STEPS_A_TURN):
            float(model.train_function(batches)["loss"])

    return steps


def without_batch_size(tensor: tf.Tensor) -> tf.Tensor:
    return tf.compat.v1.placeholder_with_default(tensor, [None, *tensor.shape[1:]])


def measure(case: Case, strategy: tf.distribute.Strategy, rounds: int) -> dict[str, float]:
    turns = {
        name: turn_of(case, strategy, adapted=name == "adapted") for name in ("stock", "adapted")
    }
    for turn in turns.values():  # traces
        turn()
    taken: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds):
        for name in sorted(turns, reverse=bool(number % 2)):
            begin = time.perf_counter()
            turns[name]()
            taken[name].append(time.perf_counter() - begin)
    stock, adapted = (statistics.median(taken[name]) for name in ("stock", "adapted"))
    ratios = [a / b for a, b in zip(taken["adapted"], taken["stock"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    batches = STEPS_A_TURN if case.use == "fit" else BATCHES
    return {
        "stock_ms": 1000 * stock / batches,
        "adapted_ms": 1000 * adapted / batches,
        "ratio": adapted / stock,
        "ratio_first_quartile": low,
        "ratio_third_quartile": high,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40, help="turns of each model")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    arguments = parser.parse_args()
    cpu = tf.config.list_physical_devices("CPU")[0]
    each = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [each] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    table = Table(title="Time of a batch, two mirrored logical CPU devices")
    for heading in ("model", "plain Keras", "adapted", "ratio", "quartiles"):
        table.add_column(heading)
    found = {}
    for name, case in CASES.items():
        one = found[name] = measure(case, strategy, arguments.rounds)
        table.add_row(
            f"{name}, batch {case.batch}",
            f"{one['stock_ms']:.1f} ms",
            f"{one['adapted_ms']:.1f} ms",
            f"{one['ratio']:.3f}",
            f"{one['ratio_first_quartile']:.3f} to {one['ratio_third_quartile']:.3f}",
        )
    Console(width=120).print(table)
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
