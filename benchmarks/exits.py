"""The time that workers take from their last step to their exit.

    python benchmarks/exits.py [--jobs 100] [--json FILE]

Jobs of two worker processes train a small network for 20 steps: under the script's own strategy,
with `init` and `fit`, with `distributed_fit`, and under `keras-distplug run`, in turns. In every
second round, two other processes keep both cores busy. The time includes the last checkpoint. Not
verified on GPU.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from measured import format_spread, parser, report, show, spread
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.cluster import environment, free_ports

WORKER = Path(__file__).parent / "workers" / "leaving.py"
WAYS = ("own strategy", "init", "distributed_fit", "keras-distplug run")
TIMEOUT_S = 300
LATE_S = 10.0


@contextmanager
def burning() -> Iterator[None]:
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        yield
    finally:
        for each in burners:
            each.kill()
            each.wait()


def exits_s(way: str, folder: Path) -> list[float]:
    """Returns the seconds from the last step of a job to the exit of every worker."""
    command = [sys.executable, str(WORKER), way, str(folder)]
    environ = environment()
    if way == "keras-distplug run":
        run = [sys.executable, "-m", "keras_distplug", "run", "--workers", "2", "--", *command]
        return [exit_s(run, environ)]
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(2)]}

    def worker(index: int) -> float:
        config = {"cluster": cluster, "task": {"type": "worker", "index": index}}
        return exit_s(command, {**environ, "TF_CONFIG": json.dumps(config)})

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(worker, range(2)))


def exit_s(command: list[str], environ: dict[str, str]) -> float:
    with tempfile.TemporaryFile("w+") as output:
        code = subprocess.run(
            command, env=environ, stdout=output, stderr=output, timeout=TIMEOUT_S, check=False
        ).returncode
        ended_s = time.monotonic()
        output.seek(0)
        printed = output.read()
    last = re.findall(r"last step: ([\d.]+)", printed)
    if code or not last:
        raise SystemExit(f"{' '.join(command)} ended with {code}:\n{printed[-3000:]}")
    return ended_s - max(map(float, last))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--jobs", type=int, default=100)
    given = options.parse_args()
    taken: dict[str, list[float]] = {
        f"{way}{load}": [] for load in ("", ", loaded") for way in WAYS
    }
    for number in range(given.jobs):
        way, is_loaded = WAYS[number % len(WAYS)], number // len(WAYS) % 2
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            if is_loaded:
                stack.enter_context(burning())
            taken[f"{way}{', loaded' * is_loaded}"] += exits_s(way, Path(folder))
    found = {name: spread(values) for name, values in taken.items() if values}
    table = Table("two workers", "processes", "s from the last step to the exit", "late")
    for name, each in found.items():
        late = sum(value > LATE_S for value in each["values"])
        table.add_row(name, str(len(each["values"])), format_spread(each), str(late))
    show(table)
    report(given, found)


if __name__ == "__main__":
    main()
