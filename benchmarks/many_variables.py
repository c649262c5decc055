"""The cost of `defaults()` for a model with 20,000 variables: first step, saves, restore.

    python benchmarks/many_variables.py [--rounds 5] [--variables 20000] [--json FILE]

The model is a Dense layer after one that has many small weights, all of them frozen and unused. New
models train without callbacks and with `defaults()`, in turns, in one process. The first step is
the time from the call of `fit` to the end of the first batch; garbage is collected before it. A
save is the time that the training thread spends at the end of an epoch in `BackupAndRestore`; a
restore reads the newest checkpoint. Not verified on GPU.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from measured import format_spread, parser, report, show, spread
from rich.table import Table

import keras_distplug as kd
from keras_distplug.checkpoint import saver

SAVES = 5  # of one round
WARM_UP = 1  # rounds that do not count
PARTS = ("bare first step", "first step", "first save", "later saves", "restore")


class Interrupted(Exception):
    pass


class Many(keras.layers.Layer):
    """Has weights that it does not use."""

    def __init__(self, count: int) -> None:
        super().__init__(trainable=False)
        self._count = count

    def build(self, shape: Any) -> None:
        for number in range(self._count):
            self.add_weight(shape=(4,), name=f"w{number}")

    def call(self, inputs: Any) -> Any:
        return inputs


class FirstStep(keras.callbacks.Callback):
    """Records the time at which the first batch ends."""

    end_s: float | None = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.end_s is None:
            self.end_s = time.perf_counter()


def new_model(count: int) -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), Many(count), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def data() -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((64, 4), "float32"), np.zeros((64, 1), "float32")


def first_step_s(count: int, callbacks: list[keras.callbacks.Callback]) -> float:
    model, first = new_model(count), FirstStep()
    gc.collect()  # the garbage of building the model is not that of its first step
    start_s = time.perf_counter()
    model.fit(*data(), batch_size=32, verbose=0, callbacks=[*callbacks, first])
    assert first.end_s is not None
    return first.end_s - start_s


class Timed(kd.BackupAndRestore):
    """Records the durations of saves; fails after `SAVES` epochs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, save_freq="epoch", on_busy="wait")
        self.saves_s: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == SAVES:
            raise Interrupted
        super().on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        saver.wait_for_all()  # so that nothing else is written
        start_s = time.perf_counter()
        super().on_epoch_end(epoch, logs)
        self.saves_s.append(time.perf_counter() - start_s)


def saves_and_restore(count: int, folder: Path) -> dict[str, list[float]]:
    model, backup = new_model(count), Timed(folder)
    with contextlib.suppress(Interrupted):
        model.fit(*data(), batch_size=32, epochs=100, verbose=0, callbacks=[backup])
    assert len(backup.saves_s) == SAVES
    other, restoring = new_model(count), kd.BackupAndRestore(folder)
    other.history = keras.callbacks.History()
    other.history.on_train_begin()
    restoring.set_model(other)
    restoring.set_params({"epochs": 100, "steps": 2})
    start_s = time.perf_counter()
    restoring.on_train_begin()
    restore_s = time.perf_counter() - start_s
    for one, another in zip(model.weights, other.weights, strict=True):
        assert np.array_equal(one.numpy(), another.numpy()), one.path
    return {
        "first save": backup.saves_s[:1],
        "later saves": backup.saves_s[1:],
        "restore": [restore_s],
    }


def measure(count: int, rounds: int) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {part: [] for part in PARTS}
    for number in range(WARM_UP + rounds):
        with tempfile.TemporaryDirectory() as name:
            folder, found = Path(name), {}
            for kind in sorted(PARTS[:2], reverse=bool(number % 2)):
                keras.backend.clear_session()
                ours = [] if kind.startswith("bare") else kd.defaults(folder / "fit")
                found[kind] = [first_step_s(count, ours)]
            keras.backend.clear_session()
            found |= saves_and_restore(count, folder / "saves")
        if number >= WARM_UP:
            for part, secs in found.items():
                taken[part] += secs
    return taken


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--variables", type=int, default=20_000)
    arguments = options.parse_args()
    logging.getLogger("keras_distplug").setLevel(logging.WARNING)
    taken = measure(arguments.variables, arguments.rounds)
    found = {part: spread(secs) for part, secs in taken.items()}
    pairs = zip(taken["bare first step"], taken["first step"], strict=True)
    found["ratio of first steps"] = spread(with_s / bare_s for bare_s, with_s in pairs)
    table = Table("", "median (quartiles)", title=f"A model with {arguments.variables:,} variables")
    for part, one in found.items():
        form = (".2f", 1, "") if part.startswith("ratio") else (".1f", 1000, " ms")
        table.add_row(part, format_spread(one, *form, quartiles=True))
    show(table)
    report(arguments, found)


if __name__ == "__main__":
    main()
