"""The response time and size of the data of a large run in TensorBoard's tab.

    python benchmarks/page.py [--workers 64] [--replicas 1] [--steps 20000] [--step-secs 0.1]
        [--rounds 5] [--json FILE]

The log has the lines that workers write in this many steps: first one per second, then one per
hundredth of the elapsed time, up to one per half minute. The measured time is that of TensorBoard's
server for both requests of a page refresh, the summaries of all runs and the details of the
selected one: the first time, then alternately after new lines of every worker and without new ones.
"""

from __future__ import annotations

import gzip
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from measured import format_spread, parser, report, show, spread
from rich.table import Table

from keras_distplug.core import events
from keras_distplug.core.event_lines import to_line
from keras_distplug.core.events import Entry, ReplicaTimes
from keras_distplug.storage.files import open_files
from keras_distplug.tensorboard_plugin.watched import Watched, answer


def moments(secs: float) -> list[float]:
    """Yields the times at which a worker writes a window."""
    found, at = [], 0.0
    while at < secs:
        at += min(max(1.0, 0.01 * at), 30.0)
        found.append(at)
    return found


def line(rank: int, replicas: int, at: float, length_s: float, step_secs: float) -> bytes:
    steps = round(length_s / step_secs)
    secs = {"step": 0.85 * length_s, "input": 0.05 * length_s, "sync": 0.1 * length_s}
    own = tuple(
        ReplicaTimes(
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
    options = parser(__doc__)
    options.add_argument("--workers", type=int, default=64)
    options.add_argument("--replicas", type=int, default=1, help="replicas per worker")
    options.add_argument("--steps", type=int, default=20_000)
    options.add_argument("--step-secs", type=float, default=0.1)
    options.add_argument("--rounds", type=int, default=5)
    parsed = options.parse_args()
    workers, replicas = parsed.workers, parsed.replicas
    random.seed(0)
    ends = moments(parsed.steps * parsed.step_secs)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "run-0001" / "log"
        log.mkdir(parents=True)
        for rank in range(workers):
            started = events.Began(
                "a", rank, workers, workers * replicas, "host", 1, "Strategy", 1, 0
            )
            lines = [to_line(Entry(0.0, f"worker-{rank}", started))]
            lines += [
                line(rank, replicas, at, at - before, parsed.step_secs)
                for before, at in zip([0.0, *ends], ends, strict=False)
            ]
            (log / f"{rank}.jsonl").write_bytes(b"".join(lines))
        size = sum(path.stat().st_size for path in log.iterdir())
        first_s: list[float] = []
        news_s: list[float] = []
        idle_s: list[float] = []
        text = ""
        for number in range(parsed.rounds):
            watched = Watched("run-0001", open_files(folder), "run-0001")
            for secs in (first_s, news_s, idle_s):
                if secs is news_s:
                    for rank in range(workers):
                        at = ends[-1] + 20 * (number + 1)
                        with open(log / f"{rank}.jsonl", "ab") as file:
                            file.write(line(rank, replicas, at, 20.0, parsed.step_secs))
                start_s = time.perf_counter()
                text = answer([watched.headline(ends[-1])]).text + watched.details(ends[-1]).text
                secs.append(time.perf_counter() - start_s)
    found: dict[str, Any] = {
        "lines_a_worker": len(ends),
        "log_bytes": size,
        "first_s": spread(first_s),
        "with_news_s": spread(news_s),
        "without_news_s": spread(idle_s),
        "sent_bytes": len(text),
        "compressed_bytes": len(gzip.compress(text.encode())),
    }
    table = Table(title=f"{workers} workers x {replicas} replicas, {parsed.steps} steps")
    for heading in (
        "lines per worker",
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
        format_spread(found["first_s"], unit=" s"),
        format_spread(found["with_news_s"], unit=" s"),
        format_spread(found["without_news_s"], ".4f", unit=" s"),
        f"{found['sent_bytes'] / 1e3:.0f} KB",
        f"{found['compressed_bytes'] / 1e3:.0f} KB",
    )
    show(table)
    report(parsed, found)


if __name__ == "__main__":
    main()
