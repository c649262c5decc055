"""What more replicas and workers bring, beside a loop of `tf.distribute` written by hand.

    python benchmarks/scaling.py [--rounds 5] [--steps 60] [--only WORK ...] [--json FILE]

Weak scaling: each replica has a batch of the same size, and one core, to which its process is bound
with all of its threads (two mirrored replicas are one process with two cores). So one replica
does not use what a second one needs, and two can at best take twice as many samples a second. What
they share is memory, its caches, and what the cores themselves share; network between machines
there is none. Three ways to train the same model with Adam, loss and accuracy:

- `distributed_fit`, with all of `defaults()`;
- by hand: `strategy.run` in a `tf.function`, over `experimental_distribute_dataset`, as in
  TensorFlow's guides. With several workers that is what there is for Keras 3 today, and saves,
  resumes and watches nothing;
- Keras' own `fit` in the strategy's scope, which does not run with several workers
  (keras-team/keras#20585).

Each measurement is a job of its own, the 20 first steps of which do not count; those of a round
follow one another, in turns. Ratios are of the same round; efficiency is the rate of all replicas
over as many times that of one replica. Linux only. Not verified on GPU.
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

from measured import parser, report, show, spread, told  # noqa: E402
from rich.table import Table  # noqa: E402
from support.cluster import run_workers  # noqa: E402

WORKER = Path(__file__).parent / "workers" / "scaled.py"
LIMIT_S = 600.0  # of a job


@dataclass(frozen=True)
class Work:
    """A function of workers/models.py, and how many samples a replica takes in a step."""

    model: str
    batch: int


@dataclass(frozen=True)
class SetUp:
    """How many processes, of how many replicas each."""

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
    """Samples a second."""
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
    """Rates, ratios and efficiencies with their spread."""
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
            ratio = "" if way == "ours" else told(one["ours_over_it"])
            efficiency = "" if name == "one replica" else told(one["efficiency"])
            table.add_row(name, label, told(one["samples_per_s"], ".0f"), ratio, efficiency)
        table.add_section()
    return table


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--steps", type=int, default=60, help="of each job")
    options.add_argument("--only", choices=list(WORKS), nargs="+", metavar="WORK")
    arguments = options.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        options.error("each of two replicas needs a core of its own, and there is one core")
    found = {}
    for name in arguments.only or WORKS:
        found[name] = in_numbers(measure(WORKS[name], arguments.rounds, arguments.steps))
        show(table_of(name, found[name], arguments.steps))
    report(arguments, found)


if __name__ == "__main__":
    main()
