"""How long TensorBoard's tab waits for news of a large run, and how much comes.

    python benchmarks/page.py [--workers 64] [--replicas 1] [--steps 20000] [--step-secs 0.1]

The log is what workers write in so many steps: a line a second at first, and then one each
hundredth of the time so far, up to half a minute. Timed is what TensorBoard's server does for a
refresh of the page, both of its requests: the headlines of all runs, and all of the chosen one.
"""

from __future__ import annotations

import argparse
import gzip
import random
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from keras_distplug.core import events
from keras_distplug.core.events import Entry, OfReplica, to_line
from keras_distplug.storage.files import open_files
from keras_distplug.tensorboard_plugin.watched import Watched, answer

REFRESHES = 5


def moments(secs: float) -> list[float]:
    """When a worker writes a window."""
    found, at = [], 0.0
    while at < secs:
        at += min(max(1.0, 0.01 * at), 30.0)
        found.append(at)
    return found


def line(rank: int, replicas: int, at: float, length_s: float, step_secs: float) -> bytes:
    steps = round(length_s / step_secs)
    secs = {"step": 0.85 * length_s, "input": 0.05 * length_s, "sync": 0.1 * length_s}
    own = tuple(
        OfReplica(
            rank * replicas + number,
            step_secs * random.uniform(0.7, 0.9),
            step_secs * random.uniform(0.05, 0.2),
        )
        for number in range(replicas)
    )
    input_s = 0.01 * random.random()
    window = events.Window(round(at / step_secs), steps, 0, secs, step_secs, input_s, 10**9, own)
    return to_line(Entry(at, f"worker-{rank}", window))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=1, help="of each worker")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--step-secs", type=float, default=0.1)
    parsed = parser.parse_args()
    workers, replicas = parsed.workers, parsed.replicas
    random.seed(0)
    ends = moments(parsed.steps * parsed.step_secs)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "run-0001" / "log"
        log.mkdir(parents=True)
        for rank in range(workers):
            began = events.Began(
                "a", rank, workers, workers * replicas, "host", 1, "Strategy", 1, 0
            )
            lines = [to_line(Entry(0.0, f"worker-{rank}", began))]
            lines += [
                line(rank, replicas, at, at - before, parsed.step_secs)
                for before, at in zip([0.0, *ends], ends, strict=False)
            ]
            (log / f"{rank}.jsonl").write_bytes(b"".join(lines))
        size = sum(path.stat().st_size for path in log.iterdir())
        watched = Watched("run-0001", open_files(folder), "run-0001")
        taken_s, idle_s, text = [], [], ""
        for number in range(1 + REFRESHES):
            for secs in (taken_s, idle_s):
                begun_s = time.perf_counter()
                text = answer([watched.headline(ends[-1])]).text + watched.details(ends[-1]).text
                secs.append(time.perf_counter() - begun_s)
            for rank in range(workers):
                at = ends[-1] + 20 * (number + 1)
                with open(log / f"{rank}.jsonl", "ab") as file:
                    file.write(line(rank, replicas, at, 20.0, parsed.step_secs))
    table = Table(title=f"{workers} workers x {replicas} replicas, {parsed.steps} steps")
    for heading in (
        "lines a worker",
        "log",
        "first time",
        "with news",
        "without",
        "sent",
        "compressed",
    ):
        table.add_column(heading)
    table.add_row(
        str(len(ends)),
        f"{size / 1e6:.1f} MB",
        f"{taken_s[0]:.2f} s",
        f"{sorted(taken_s[1:])[REFRESHES // 2]:.2f} s",
        f"{sorted(idle_s)[REFRESHES // 2]:.3f} s",
        f"{len(text) / 1e3:.0f} KB",
        f"{len(gzip.compress(text.encode())) / 1e3:.0f} KB",
    )
    Console().print(table)


if __name__ == "__main__":
    main()
