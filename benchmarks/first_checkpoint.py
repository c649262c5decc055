"""The time of the first checkpoint with default arguments, and the cost of saves.

    python benchmarks/first_checkpoint.py [--rounds 3] [--json FILE]

A perceptron of 1 M weights trains with steps of 10 ms and of 2 s (a callback sleeps), with plain
Keras and with `BackupAndRestore` of `defaults()` in turn: 3,000 and 30 steps. The overhead is the
time of the whole `fit`, divided by that of plain Keras, both without the first two steps.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tempfile
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
from measured import format_spread, parser, report, show, spread
from rich.table import Table

import keras_distplug as kd

STEPS = {0.01: 3000, 2.0: 30}
MANIFESTS = "run-*/*/MANIFEST.json"


class Sleep(keras.callbacks.Callback):
    """Delays every step, and records the time at which the first checkpoint exists."""

    def __init__(self, step_s: float, folder: Path) -> None:
        super().__init__()
        self._step_s, self._folder = step_s, folder
        self.first_s: float | None = None
        self.saves = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._start_s = time.monotonic()
        self._steps = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._steps += 1
        if self._steps == 3:
            self._third_s = time.monotonic()
        time.sleep(self._step_s)
        if self.first_s is None and any(self._folder.glob(MANIFESTS)):
            self.first_s = time.monotonic() - self._start_s

    def on_train_end(self, logs: Any = None) -> None:
        self.took_s = time.monotonic() - self._third_s


def fit(step_s: float, *, with_defaults: bool) -> Sleep:
    steps = STEPS[step_s]
    x = np.zeros((8 * steps, 16), "float32")
    model = keras.Sequential(
        [keras.Input((16,)), keras.layers.Dense(1000), keras.layers.Dense(1000)]
    )
    model.compile("sgd", "mse")
    with tempfile.TemporaryDirectory() as folder:
        sleep = Sleep(step_s, Path(folder))
        ours = kd.defaults(folder)[:1] if with_defaults else []
        y = np.zeros((8 * steps, 1000), "float32")
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[*ours, sleep])
    return sleep


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=3)
    given = arguments.parse_args()
    fit(0.01, with_defaults=True)  # loads everything that is loaded once
    found = {}
    table = Table("step", "first checkpoint after", "time / plain Keras", title="default arguments")
    for step_s in STEPS:
        pairs = [
            [fit(step_s, with_defaults=with_defaults) for with_defaults in (False, True)]
            for _ in range(given.rounds)
        ]
        first = spread(ours.first_s or float("nan") for _, ours in pairs)
        ratio = spread(ours.took_s / plain.took_s for plain, ours in pairs)
        found[str(step_s)] = {"first_s": first, "ratio": ratio}
        table.add_row(
            f"{step_s:g} s", format_spread(first, ".1f", unit=" s"), format_spread(ratio, ".4f")
        )
    show(table)
    report(given, found)


if __name__ == "__main__":
    main()
