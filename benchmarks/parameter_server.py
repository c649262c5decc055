"""`fit` with parameter servers: its cost compared with a hand-written loop, its accuracy, and the
effect of kills.

    python benchmarks/parameter_server.py [--steps N] [--rounds N] [--seeds N] [--every SECONDS]
        [--only PART] [--json FILE]

One chief, two workers and a parameter server, as processes on this machine.

- Throughput: steps per second of `distributed_fit` divided by those of a `ClusterCoordinator` loop,
  in one job, in turns, for a step that computes for a few milliseconds. The target is 0.95.
- Accuracy: on handwritten digits, over seeds, compared with one process with the same batches.
- Kills: under the supervisor, a random worker is killed every few seconds, until the job has
  finished with all its steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from measured import format_spread, parser, report, show, spread  # noqa: E402
from rich.table import Table  # noqa: E402
from support.cluster import environment  # noqa: E402
from support.job import Job  # noqa: E402
from support.watched import Watched  # noqa: E402

SCRIPT = Path(__file__).parent / "workers" / "serving.py"
WORKERS, LIMIT_S = 2, 3600.0


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--every", type=float, default=5.0, help="seconds between kills")
    options.add_argument("--only", choices=list(PARTS))
    given = options.parse_args()
    found: dict[str, Any] = {}
    for what in [given.only] if given.only else PARTS:
        with tempfile.TemporaryDirectory() as folder:
            table, found[what] = PARTS[what](Path(folder), given)
        show(table)
    report(given, found)


def throughput(folder: Path, given: argparse.Namespace) -> tuple[Table, dict[str, Any]]:
    pairs = ended(folder, "throughput", given.steps, given.rounds)
    found = {
        "fit": spread(ours for ours, _ in pairs),
        "by_hand": spread(theirs for _, theirs in pairs),
        "ratio": spread(ours / theirs for ours, theirs in pairs),
    }
    title = f"Steps a second, {given.rounds} epochs of {given.steps} steps: median (range)"
    table = Table(
        "`distributed_fit`", "loop by hand", "ratio of epochs, the bar is 0.95", title=title
    )
    table.add_row(
        *(format_spread(found[name], ".1f") for name in ("fit", "by_hand")),
        format_spread(found["ratio"], ".3f"),
    )
    return table, found


def accuracy(folder: Path, given: argparse.Namespace) -> tuple[Table, dict[str, Any]]:
    pairs = ended(folder, "accuracy", given.steps, given.seeds)
    servers, alone = (list(each) for each in zip(*pairs, strict=True))
    apart = 100 * (statistics.mean(servers) - statistics.mean(alone))
    found = {
        "parameter_servers": spread(servers),
        "one_process": spread(alone),
        "means_apart_points": apart,
    }
    title = f"Accuracy of handwritten digits, {given.seeds} seeds: median (range)"
    headings = ("parameter servers", "one process", "means apart, the bar is 1 point")
    table = Table(*headings, title=title)
    table.add_row(
        format_spread(found["parameter_servers"], ".4f"),
        format_spread(found["one_process"], ".4f"),
        f"{apart:+.2f} points",
    )
    return table, found


def kills(folder: Path, given: argparse.Namespace) -> tuple[Table, dict[str, Any]]:
    options = ["--workers", str(WORKERS), "--ps=1", f"--log={folder / 'events'}"]
    command = [sys.executable, "-m", "keras_distplug", "run", *options, "--"]
    steps = 10 * given.steps
    command += [sys.executable, str(SCRIPT), "kills", str(folder), str(steps), "1"]
    running = Watched(command, environment(), folder)
    killed = 0
    try:
        running.await_((folder / "started").exists, LIMIT_S)
        while not (folder / "found.json").exists():
            time.sleep(given.every)
            worker = random.randrange(WORKERS)
            pid = int(re.findall(rf"\[worker-{worker}\] pid (\d+)", running.output)[-1])
            with contextlib.suppress(ProcessLookupError):  # the previous one, which was killed
                os.kill(pid, signal.SIGKILL)
                killed += 1
        assert running.code(LIMIT_S) == 0, running.output
    finally:
        running.kill()
    [applied] = json.loads((folder / "found.json").read_text())
    lines = (folder / "events").read_text().splitlines()
    events = Counter(json.loads(line)["event"] for line in lines)
    found = {
        "kills": killed,
        "starts_of_one": events["started_again"],
        "starts_of_all": events["failed"],
        "updates": applied,
        "steps": steps,
    }
    table = Table(*(name.replace("_", " ") for name in found))
    table.title = f"A worker killed every {given.every:g} s"
    table.add_row(*map(str, found.values()))
    return table, found


def ended(folder: Path, what: str, *numbers: int) -> list[list[float]]:
    with job(folder, what, *numbers) as running:
        code = running.wait("chief", 0, LIMIT_S)
        assert code == 0, running.output_ends()
    found: list[list[float]] = json.loads((folder / "found.json").read_text())
    return found


def job(folder: Path, what: str, *numbers: int) -> Job:
    command = [str(SCRIPT), what, str(folder), *map(str, numbers)]
    return Job(folder, command, WORKERS, {"PATH": os.environ["PATH"]})


PARTS = {"throughput": throughput, "accuracy": accuracy, "kills": kills}

if __name__ == "__main__":
    main()
