"""The cost of `defaults()` in a `fit` with short steps: in total, first epoch, and later steps.

    python benchmarks/short_steps.py [--rounds 20] [--steps 250] [--each] [--json FILE]

Three models as in Keras' guides, on arrays in batches of 32, train four epochs without callbacks,
with Keras' BackupAndRestore, and with `defaults()`, in turns, in one process; every `fit` has a new
model. The same for a `fit` of eight steps. A ratio is that of two `fit`s of one round. `--each`
adds every callback of `defaults()` with its `BackupAndRestore` only. Not verified on GPU.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from keras import layers
from measured import format_spread, parser, report, show, spread
from rich.table import Table

import keras_distplug as kd

EPOCHS, BATCH = 4, 32
WARM_UP = 1  # rounds that do not count
PARTS = ("whole", "first_epoch", "step", "eight_steps")
Callbacks = Callable[[Path], list[keras.callbacks.Callback]]


def one_layer() -> keras.Model:
    return keras.Sequential([keras.Input((28, 28, 1)), layers.Flatten(), layers.Dense(10)])


def mlp() -> keras.Model:
    hidden = [layers.Dense(256, activation="relu") for _ in range(2)]
    return keras.Sequential(
        [keras.Input((28, 28, 1)), layers.Flatten(), *hidden, layers.Dropout(0.2), layers.Dense(10)]
    )


def convolutional() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(10),
        ]
    )


MODELS = {"one layer": one_layer, "MLP": mlp, "MNIST CNN": convolutional}


class Clock(keras.callbacks.Callback):
    """Records the times at which epochs end."""

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self.ends_s: list[float] = []

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self.ends_s.append(time.perf_counter())


def fit_s(build: Callable[[], keras.Model], callbacks: Callbacks, steps: int, epochs: int) -> Clock:
    """Trains a new model; the durations are in `whole_s` and `first_s`."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    draw = np.random.default_rng(0)
    x = draw.random((BATCH * steps, 28, 28, 1), "float32")
    y = draw.integers(0, 10, BATCH * steps)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        start_s = time.perf_counter()
        model.fit(
            x, y, batch_size=BATCH, epochs=epochs, verbose=0,
            callbacks=[*callbacks(Path(folder)), clock],
        )  # fmt: skip
        clock.whole_s = time.perf_counter() - start_s
    clock.first_s = clock.ends_s[0] - start_s
    return clock


def measure(
    build: Callable[[], keras.Model], kinds: Mapping[str, Callbacks], rounds: int, steps: int
) -> dict[str, dict[str, list[float]]]:
    """Returns the seconds of every part, by kind."""
    taken = {kind: {part: [] for part in PARTS} for kind in kinds}
    for number in range(WARM_UP + rounds):
        for kind in sorted(kinds, reverse=bool(number % 2)):
            clock = fit_s(build, kinds[kind], steps, EPOCHS)
            later_s = clock.ends_s[-1] - clock.ends_s[0]
            found = {
                "whole": clock.whole_s,
                "first_epoch": clock.first_s,
                "step": later_s / (steps * (EPOCHS - 1)),
                "eight_steps": fit_s(build, kinds[kind], 8, 1).whole_s,
            }
            if number >= WARM_UP:
                for part, secs in found.items():
                    taken[kind][part].append(secs)
    return taken


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--steps", type=int, default=250, help="steps per epoch")
    options.add_argument("--each", action="store_true", help="also measure every callback alone")
    options.add_argument("--models", default=",".join(MODELS))
    arguments = options.parse_args()
    logging.getLogger("keras_distplug").setLevel(logging.WARNING)
    kinds: dict[str, Callbacks] = {
        "bare": lambda folder: [],
        "Keras' BackupAndRestore": lambda folder: [
            keras.callbacks.BackupAndRestore(str(folder / "keras"))
        ],
        "defaults()": lambda folder: kd.defaults(folder),
    }
    if arguments.each:
        for place, one in enumerate(kd.defaults("runs")):
            kinds[f"first and {type(one).__name__}"] = partial(_two, place=place)
    table = Table(title="Ratio to the same fit without callbacks: median (quartiles)")
    for heading in ("model", "callbacks", "a bare step", *PARTS):
        table.add_column(heading.replace("_", " "))
    found: dict[str, Any] = {}
    for name in arguments.models.split(","):
        taken = measure(MODELS[name], kinds, arguments.rounds, arguments.steps)
        found[name] = {}
        for kind in list(kinds)[1:]:
            ratios = {
                part: spread(
                    b / a for a, b in zip(taken["bare"][part], taken[kind][part], strict=True)
                )
                for part in PARTS
            }
            found[name][kind] = {"ratios": ratios, "secs": taken[kind]}
            bare = spread(taken["bare"]["step"])
            table.add_row(
                name,
                kind,
                format_spread(bare, ".2f", 1000, " ms", quartiles=True),
                *(format_spread(ratios[part], ".3f", quartiles=True) for part in PARTS),
            )
        found[name]["bare"] = {"secs": taken["bare"]}
    show(table)
    report(arguments, found)


def _two(folder: Path, place: int) -> list[keras.callbacks.Callback]:
    """Returns the BackupAndRestore, which other callbacks need, and one more."""
    ours = kd.defaults(folder)
    return ours[:1] if place == 0 else [ours[0], ours[place]]


if __name__ == "__main__":
    main()
