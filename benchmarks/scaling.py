"""The speedup by more replicas and workers, compared with a hand-written `tf.distribute` loop.

    python benchmarks/scaling.py [--rounds 5] [--steps 60] [--only WORK ...] [--json FILE]

Weak scaling: every replica has a batch of the same size and one core, to which all threads of its
process are bound (two mirrored replicas are one process with two cores). So one replica does not
use the resources of a second one, and two can at best process twice as many samples per second.
They share memory, caches, and the shared parts of the cores; there is no network between machines.
Three ways to train the same model with Adam, loss and accuracy:

- `distributed_fit`, with all of `defaults()`;
- by hand: `strategy.run` in a `tf.function`, over `experimental_distribute_dataset`, as in
  TensorFlow's guides. With several workers, this is currently the only way with Keras 3; it does
  not save, resume or watch anything;
- Keras' own `fit` in the strategy's scope, which does not run with several workers
  (keras-team/keras#20585).

Every measurement is a separate job, whose first 20 steps are not counted; those of a round are run
one after another. Ratios are within a round; efficiency is the rate of all replicas divided by
their number times the rate of one replica. Linux only. Not verified on GPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from measured import format_spread, parser, report, show, spread  # noqa: E402
from rich.table import Table  # noqa: E402
from support.cluster import run_workers  # noqa: E402

WORKER = Path(__file__).parent / "workers" / "scaled.py"
LIMIT_S = 600.0  # of a job


@dataclass(frozen=True)
class Work:
    """A function of workers/models.py, and the number of samples per replica and step."""

    model: str
    batch: int


@dataclass(frozen=True)
class SetUp:
    """The number of processes, and of replicas per process."""

    workers: int
    replicas: int


WORKS = {
    "perceptron": Work("perceptron", 256),
    "convolutions": Work("convolutional", 256),
    "short-steps": Work("convolutional", 64),
}
SET_UPS = {
    "one replica": SetUp(1, 1),
    "two mirrored": SetUp(1, 2),
    "two workers": SetUp(2, 1),
}
WAYS = {"ours": "distributed_fit", "by_hand": "by hand", "keras": "Keras' fit"}
Rates = dict[str, dict[str, list[float]]]  # samples a second, by set-up and way


def rate(way: str, work: Work, set_up: SetUp, steps: int) -> float:
    """Returns the samples per second."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rate"
        numbers = (work.batch, set_up.replicas, steps)
        command = [str(WORKER), way, work.model, *map(str, numbers), str(file)]
        ended = run_workers(command, set_up.workers, timeout_s=LIMIT_S)
        if any(each.returncode for each in ended):
            sys.exit(f"{way}, {work}, {set_up}:\n" + "\n".join(each.output for each in ended))
        return float(file.read_text())


def runs(way: str, set_up: SetUp) -> bool:
    return way != "keras" or set_up.workers == 1


def measure(work: Work, rounds: int, steps: int) -> Rates:
    rates: Rates = {name: {way: [] for way in WAYS} for name in SET_UPS}
    for number in range(rounds):
        for name, set_up in SET_UPS.items():
            for way in list(WAYS) if number % 2 else reversed(WAYS):
                if runs(way, set_up):
                    rates[name][way].append(rate(way, work, set_up, steps))
    return rates


def in_numbers(rates: Rates) -> dict[str, Any]:
    """Returns rates, ratios and efficiencies with their spread."""
    found: dict[str, Any] = {}
    for name, of_ways in rates.items():
        replicas = SET_UPS[name].workers * SET_UPS[name].replicas
        found[name] = {}
        for way, taken in of_ways.items():
            if taken:
                ours, one = of_ways["ours"], rates["one replica"][way]
                found[name][way] = {
                    "samples_per_s": spread(taken),
                    "ours_over_it": spread(a / b for a, b in zip(ours, taken, strict=True)),
                    "efficiency": spread(
                        all_s / (replicas * one_s) for all_s, one_s in zip(taken, one, strict=True)
                    ),
                }
    return found


def table_of(title: str, found: Mapping[str, Any], steps: int) -> Table:
    work = WORKS[title]
    step_ms = 1000 * work.batch / found["one replica"]["ours"]["samples_per_s"]["median"]
    table = Table(
        title=f"{title}: {work.batch} samples a replica, steps of {step_ms:.0f} ms on one core, "
        f"{steps} of them: medians (range)"
    )
    for heading in ("", "way", "samples/s", "ours over it", "efficiency"):
        table.add_column(heading)
    for name, of_ways in found.items():
        for way, label in WAYS.items():
            if way not in of_ways:
                table.add_row(name, label, "does not run")
                continue
            one = of_ways[way]
            ratio = "" if way == "ours" else format_spread(one["ours_over_it"])
            efficiency = "" if name == "one replica" else format_spread(one["efficiency"])
            table.add_row(
                name, label, format_spread(one["samples_per_s"], ".0f"), ratio, efficiency
            )
        table.add_section()
    return table


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--steps", type=int, default=60, help="steps per job")
    options.add_argument("--only", choices=list(WORKS), nargs="+", metavar="WORK")
    arguments = options.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        options.error("two replicas need two cores, but only one is available")
    found = {}
    for name in arguments.only or WORKS:
        found[name] = in_numbers(measure(WORKS[name], arguments.rounds, arguments.steps))
        show(table_of(name, found[name], arguments.steps))
    report(arguments, found)


if __name__ == "__main__":
    main()
