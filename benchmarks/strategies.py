"""The cost of correctness: the step time of an adapted model relative to plain Keras.

    python benchmarks/strategies.py [--rounds 40] [--json FILE]

MirroredStrategy over two logical CPU devices, on work that plain Keras also does correctly: even
batches, no clipping, no dropout. If the dataset does not declare that all batches are even, the
adapted model checks every batch before its step. Both models take turns, three steps (or one
evaluate or predict of eight batches) each, in one process; the ratio is that of the medians, its
spread that of the rounds. Not verified on GPU.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf
from measured import format_spread, parser, report, show, spread
from rich.table import Table
from workers.models import convolutional, one_batch_for, perceptron

import keras_distplug as kd

STEPS_A_TURN = 3
BATCHES = 8  # of an evaluate or predict
Build = Callable[[], keras.Model]
normalized = partial(convolutional, partial(keras.layers.BatchNormalization, synchronized=True))


@dataclass(frozen=True)
class Case:
    build: Build
    batch: int
    is_even: bool = True  # whether the dataset declares it; it is true in any case
    use: str = "fit"


CASES = {
    "perceptron, 2.6 M weights": Case(perceptron, 256),
    "convolutions": Case(convolutional, 128),
    "convolutions, BatchNormalization": Case(normalized, 128),
    "convolutions, perhaps uneven": Case(convolutional, 128, False),
    "the same, large batches": Case(convolutional, 512, False),
    "the same, evaluate": Case(convolutional, 512, False, "evaluate"),
    "the same, predict": Case(convolutional, 512, False, "predict"),
}


def turn_of(case: Case, strategy: tf.distribute.Strategy, *, adapted: bool) -> Callable[[], None]:
    """Returns a function that takes a few training steps, or evaluates, or predicts."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = case.build()
    if adapted:
        kd.adapt(model)
    data = one_batch_for(model, case.batch)
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


def measure(case: Case, strategy: tf.distribute.Strategy, rounds: int) -> dict[str, Any]:
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
    stock, adapted = taken["stock"], taken["adapted"]
    batches = STEPS_A_TURN if case.use == "fit" else BATCHES
    return {
        "stock_s": spread(each / batches for each in stock),
        "adapted_s": spread(each / batches for each in adapted),
        "ratio_of_medians": statistics.median(adapted) / statistics.median(stock),
        "ratio": spread(a / b for a, b in zip(adapted, stock, strict=True)),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=40, help="rounds per model")
    arguments = options.parse_args()
    cpu = tf.config.list_physical_devices("CPU")[0]
    each = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [each] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    table = Table(title="Time of a batch, two mirrored logical CPU devices: median (quartiles)")
    for heading in ("model", "plain Keras", "adapted", "ratio of medians", "of rounds"):
        table.add_column(heading)
    found = {}
    for name, case in CASES.items():
        one = found[name] = measure(case, strategy, arguments.rounds)
        table.add_row(
            f"{name}, batch {case.batch}",
            format_spread(one["stock_s"], ".1f", 1000, " ms", quartiles=True),
            format_spread(one["adapted_s"], ".1f", 1000, " ms", quartiles=True),
            f"{one['ratio_of_medians']:.3f}",
            format_spread(one["ratio"], ".3f", quartiles=True),
        )
    show(table)
    report(arguments, found)


if __name__ == "__main__":
    main()
