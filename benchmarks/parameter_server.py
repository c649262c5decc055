"""What `fit` with parameter servers costs beside a loop written by hand, what it learns, and what
kills do to it.

    python benchmarks/parameter_server.py [--steps N] [--rounds N] [--seeds N] [--every SECONDS]

One chief, two workers and a parameter server, as processes on this machine.

- Throughput: steps a second of `distributed_fit` over those of a loop of `ClusterCoordinator`, in
  one job, in turns, for a step that computes for a few milliseconds. The bar is 0.95.
- Accuracy: of handwritten digits, over seeds, beside that of one process with the same batches.
- Kills: under the supervisor, a worker, chosen at random, every few seconds until the job has
  ended, with all its steps.
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

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.cluster import environment  # noqa: E402
from support.job import Job  # noqa: E402
from support.watched import Watched  # noqa: E402

SCRIPT = Path(__file__).parent / "workers" / "serving.py"
WORKERS, LIMIT_S = 2, 3600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between kills")
    parser.add_argument("--only", choices=["throughput", "accuracy", "kills"])
    given = parser.parse_args()
    for what in [given.only] if given.only else ["throughput", "accuracy", "kills"]:
        with tempfile.TemporaryDirectory() as folder:
            globals()[what](Path(folder), given)


def throughput(folder: Path, given: argparse.Namespace) -> None:
    found = ended(folder, "throughput", given.steps, given.rounds)
    ratios = [ours / theirs for ours, theirs in found]
    print(f"steps a second, `fit` and by hand: {found}")
    print(
        f"ratio: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}; "
        "the bar is 0.95"
    )


def accuracy(folder: Path, given: argparse.Namespace) -> None:
    found = ended(folder, "accuracy", given.steps, given.seeds)
    apart = 100 * (statistics.mean(a for a, _ in found) - statistics.mean(s for _, s in found))
    print(f"accuracy by seed, with parameter servers and in one process: {found}")
    print(f"means apart: {apart:+.2f} points; the bar is 1")


def kills(folder: Path, given: argparse.Namespace) -> None:
    options = ["--workers", str(WORKERS), "--ps=1", "--warm-spares", f"--log={folder / 'events'}"]
    command = [sys.executable, "-m", "keras_distplug", "run", *options, "--"]
    steps = 10 * given.steps
    command += [sys.executable, str(SCRIPT), "kills", str(folder), str(steps), "1"]
    running = Watched(command, environment(), folder)
    killed = 0
    try:
        running.await_((folder / "begun").exists, LIMIT_S)
        while not (folder / "found.json").exists():
            time.sleep(given.every)
            worker = random.randrange(WORKERS)
            pid = int(re.findall(rf"\[worker-{worker}\] pid (\d+)", running.output)[-1])
            with contextlib.suppress(ProcessLookupError):  # that of before, which was killed
                os.kill(pid, signal.SIGKILL)
                killed += 1
        assert running.code(LIMIT_S) == 0, running.output
    finally:
        running.kill()
    [applied] = json.loads((folder / "found.json").read_text())
    told = [json.loads(line)["event"] for line in (folder / "events").read_text().splitlines()]
    again = Counter(told)["started_again"]
    print(
        f"a worker killed each {given.every:g} s: {killed} kills, {again} starts of one alone, "
        f"{Counter(told)['failed']} of all; {applied} updates for {steps} steps"
    )


def ended(folder: Path, what: str, *numbers: int) -> list[list[float]]:
    with job(folder, what, *numbers) as running:
        code = running.wait("chief", 0, LIMIT_S)
        assert code == 0, running.told()
    found: list[list[float]] = json.loads((folder / "found.json").read_text())
    return found


def job(folder: Path, what: str, *numbers: int) -> Job:
    command = [str(SCRIPT), what, str(folder), *map(str, numbers)]
    return Job(folder, command, WORKERS, {"PATH": os.environ["PATH"]})


if __name__ == "__main__":
    main()
