"""The reports of `StragglerWatchdog` with mirrored logical CPU devices.

    python benchmarks/stragglers.py [--rounds 20] [--json FILE]

Two replicas of one process train, in turns, with replica 1 taking twice as long (it sleeps for
20 ms in addition to steps of 20 ms), with replica 0 taking twice as long, and with both alike.
Logical devices share the process's threads and the machine's cores, so their times are noisy: this
benchmark reports results and does not set a target. For several workers, see
tests/scenarios/test_stragglers_of_workers.py, with `python -m pytest --stage soak -s`. The time of
a step is that of a whole `fit` divided by its steps.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from measured import format_spread, parser, report, show, spread
from rich.table import Table

import keras_distplug as kd
from keras_distplug.replicas.stragglers import Straggler

EACH_S = 0.02
WINDOW, WINDOWS, BATCH = 10, 8, 64


class Sleeps(keras.layers.Layer):
    """A layer that takes twice as long on one replica."""

    def __init__(self, slow: int | None) -> None:
        super().__init__()
        self.slow = slow

    def call(self, inputs: Any) -> Any:
        context = tf.distribute.get_replica_context()
        if context is None or isinstance(inputs, keras.KerasTensor):
            return inputs

        def wait(value: Any, replica: Any) -> Any:
            time.sleep(2 * EACH_S if replica == self.slow else EACH_S)
            return value

        given = [inputs, context.replica_id_in_sync_group]
        later = tf.numpy_function(wait, given, tf.float32, stateful=False)
        later.set_shape(inputs.shape)
        return inputs + tf.stop_gradient(later - inputs)


def fitted(slow: int | None) -> tuple[list[Straggler], float]:
    """Returns the stragglers reported in a `fit`, and the seconds per step."""
    found: list[Straggler] = []
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        keras.utils.set_random_seed(0)
        hidden = [keras.layers.Dense(256, activation="relu") for _ in range(2)]
        layers = [keras.Input((64,)), Sleeps(slow), *hidden, keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(BATCH * WINDOW * WINDOWS, 64)).astype("float32")
    watchdog = kd.StragglerWatchdog(WINDOW, on_straggler=found.append)
    start_s = time.perf_counter()
    model.fit(x, x[:, :1], batch_size=BATCH, verbose=0, callbacks=[watchdog])
    return found, (time.perf_counter() - start_s) / (WINDOW * WINDOWS)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=20)
    arguments = options.parse_args()
    logging.getLogger("keras_distplug").setLevel(logging.WARNING)
    cpu = tf.config.list_physical_devices("CPU")[0]
    each = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [each] * 2)
    cases = {"replica 1 is slow": 1, "replica 0 is slow": 0, "both alike": None}
    right: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    steps_s: dict[str, list[float]] = {case: [] for case in cases}
    for _ in range(arguments.rounds):
        for case, slow in cases.items():
            stragglers, step_s = fitted(slow)
            named = {(each.cause, each.replica) for each in stragglers}
            expected = set() if slow is None else {("compute", slow)}
            right[case] += named == expected
            wrong[case] += bool(named - expected)
            steps_s[case].append(step_s)
    table = Table("case", "rounds", "correct", "another replica named", "step: median (range)")
    found = {}
    for case in cases:
        a_step = spread(steps_s[case])
        found[case] = {"as_it_is": right[case], "else_named": wrong[case], "step_s": a_step}
        counts = (str(each) for each in (arguments.rounds, right[case], wrong[case]))
        table.add_row(case, *counts, format_spread(a_step, ".0f", 1000, " ms"))
    show(table)
    report(arguments, found)


if __name__ == "__main__":
    main()
