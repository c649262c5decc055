"""The cost of a save to S3, compared with the simplest ways of sending the same bytes.

    python benchmarks/stores.py --url s3://bucket/folder --storage-options '{"key": ...}'
        [--size 1000] [--rounds 5] [--json FILE]

`cd tests && python -m stores.ceph` starts a real store on this machine, and prints both options.

Three ways, in a separate process per round, interleaved, with medians:

- save: one process writes a checkpoint, hashes and commits it (`storage.commit.Writer`);
- curl: one PUT of a file that holds the same bytes, to a presigned URL;
- fsspec: `put` of that file, as fsspec's file system does it by default.

Memory is the peak of a process while it sends, minus its memory before: for a save, the state
exists before. If the store is on the same machine, the CPU time of the whole machine includes the
work of the store.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from measured import format_spread, parser, report, show, spread
from rich.table import Table

from keras_distplug.core.state import Cursor, TrainState
from keras_distplug.storage.commit import Team, Writer
from keras_distplug.storage.files import open_files
from keras_distplug.storage.runs import create_run
from keras_distplug.storage.store import CheckpointStore

MB = 10**6
ARRAYS = 40


@dataclass(frozen=True)
class Taken:
    """The cost of one way in one round."""

    seconds: float
    memory_mb: float
    own_cpu_s: float
    machine_cpu_s: float  # of all processes, including a store on this machine


class NoExchange:
    """The exchange of a writer that has no other workers."""

    def send(self, topic: str, text: str) -> None:
        return

    def receive(self, topic: str, timeout_s: float) -> str:
        raise AssertionError(topic)

    def forget(self, topic: str) -> None:
        return


def memory_mb(field: str) -> float:
    """Returns the memory of this process: `VmRSS` is the current one, `VmHWM` the peak."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if field in line]
    return int(line.split()[1]) * 1024 / MB


def cpu_s() -> tuple[float, float]:
    """Returns the CPU time of this process with its children, and of the machine."""
    user, nice, system, _, _, *interrupts = map(
        int, Path("/proc/stat").read_text().partition("\n")[0].split()[1:8]
    )
    machine_s = (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
    return sum(os.times()[:4]), machine_s


def measured(action: Callable[[], object]) -> Taken:
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before_mb, (own_s, machine_s), begin = memory_mb("VmRSS"), cpu_s(), time.perf_counter()
    action()
    seconds, (own_end_s, machine_end_s) = time.perf_counter() - begin, cpu_s()
    memory = memory_mb("VmHWM") - before_mb
    return Taken(seconds, memory, own_end_s - own_s, machine_end_s - machine_s)


def arrays(size_mb: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        f"w{i}": rng.random(round(size_mb * MB / 4 / ARRAYS), np.float32) for i in range(ARRAYS)
    }


def save(url: str, options: Mapping[str, Any], size_mb: float, file: Path) -> Taken:
    state = TrainState(Cursor(0, 0, 1), arrays(size_mb))
    files = open_files(url, options)
    run = create_run(files, job=None, seed=0).name  # connects, too
    writer = Writer(files, CheckpointStore(files, run), Team(0, 1, NoExchange()))
    return measured(lambda: writer.save(state, writer.new_attempt()))


def put(url: str, options: Mapping[str, Any], size_mb: float, file: Path) -> Taken:
    fs, path = fsspec.url_to_fs(url, **options)
    fs.pipe_file(f"{path}/small", b"")  # connects
    return measured(lambda: fs.put(str(file), f"{path}/large"))


def curl(url: str, options: Mapping[str, Any], size_mb: float, file: Path) -> Taken:
    fs, path = fsspec.url_to_fs(url, **options)
    target = fs.sign(f"{path}/large", client_method="put_object")
    command = ["curl", "--silent", "--show-error", "--fail", "--upload-file", str(file), target]
    return measured(lambda: subprocess.run(command, check=True))


WAYS = {"save": save, "curl": curl, "fsspec put": put}


def measure(
    url: str, options: Mapping[str, Any], size_mb: float, rounds: int, file: Path
) -> dict[str, list[Taken]]:
    taken: dict[str, list[Taken]] = {way: [] for way in WAYS}
    for number in range(rounds):
        names = list(WAYS)
        for name in names if number % 2 else reversed(names):
            place = f"{url.rstrip('/')}/{uuid.uuid4().hex}"
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                job = process.submit(WAYS[name], place, options, size_mb, file)
                taken[name].append(job.result())
            fs, path = fsspec.url_to_fs(place, **options)
            fs.invalidate_cache()
            fs.rm(path, recursive=True)
    return taken


def table_of(taken: Mapping[str, list[Taken]], size_mb: float) -> Table:
    table = Table(title=f"{size_mb:.0f} MB to S3, {len(taken['save'])} rounds")
    headings = ("", "MB/s: median (range)", "save's share of it", "memory")
    for heading in (*headings, "its CPU time", "the machine's"):
        table.add_column(heading)
    medians = {
        way: statistics.median(each.seconds for each in found) for way, found in taken.items()
    }
    for way, found in taken.items():
        table.add_row(
            way,
            format_spread(spread(size_mb / each.seconds for each in found), ".0f"),
            f"{medians[way] / medians['save']:.2f}",
            "" if way == "curl" else f"{max(each.memory_mb for each in found):.0f} MB",
            f"{statistics.median(each.own_cpu_s for each in found):.1f} s",
            f"{statistics.median(each.machine_cpu_s for each in found):.1f} s of "
            f"{(os.cpu_count() or 1) * medians[way]:.1f} s",
        )
    return table


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--url", help="a folder in S3; the measured files are deleted")
    options.add_argument("--storage-options", type=json.loads, default={}, help="JSON")
    options.add_argument("--size", type=float, default=1000, help="MB of state")
    options.add_argument("--rounds", type=int, default=5)
    arguments = options.parse_args()
    if not arguments.url:
        options.error("--url is missing; `cd tests && python -m stores.ceph` starts a store")
    if not shutil.which("curl"):
        options.error("curl is missing")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "large"
        with file.open("wb") as content:
            for array in arrays(arguments.size).values():
                content.write(array.data)
        taken = measure(
            arguments.url, arguments.storage_options, arguments.size, arguments.rounds, file
        )
    found = {
        way: {name: spread(asdict(each)[name] for each in rounds) for name in asdict(rounds[0])}
        for way, rounds in taken.items()
    }
    show(table_of(taken, arguments.size))
    report(arguments, found)


if __name__ == "__main__":
    main()
