"""What agreements, statistics, a save and a restore cost many workers, in a simulation.

    python benchmarks/scale.py [--workers 8 64 512 4096] [--message-us 300] [--json FILE]
    python benchmarks/scale.py --measure

The package's own code (agreements, reports, stopping, commit, store, retention) is run by simulated
workers, each of which is a thread in a modelled time: tests/support/simulated.py. The coordination
service and the store are models, whose messages and bytes are counted. `--measure` takes what a
message costs from TensorFlow's own service, between two processes on this machine, and ends. No
such cluster was run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from support.at_scale import Cost, all_costs, manifest_parts  # noqa: E402
from support.cluster import run_workers  # noqa: E402
from support.simulated import Costs, StoreCosts  # noqa: E402

MEASURES = Path(__file__).parent / "workers" / "service.py"
FASTER = 1.1  # power of the number of workers, from which growth counts as more than linear


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--measure", action="store_true", help="TensorFlow's service, and end")
    parser.add_argument("--message-us", type=float, default=Costs.message_s * 1e6)
    parser.add_argument("--json", type=Path, help="a file for all numbers")
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measured(), indent=1))
        return
    costs = replace(Costs(), message_s=given.message_us / 1e6)
    found: list[Cost] = []
    for count in given.workers:
        begun_s = time.monotonic()
        for each in all_costs(count, costs):
            found.append(each)
            print(each, file=sys.stderr, flush=True)
        print(f"{count} workers: simulated in {time.monotonic() - begun_s:.0f} s", file=sys.stderr)
    console = Console(width=120)
    console.print(table(found))
    manifests = {count: manifest_parts(count) for count in given.workers}
    for count, parts in manifests.items():
        told = ", ".join(f"{name} {size / 1e6:.2f}" for name, size in parts.items())
        console.print(f"manifest of {count} workers: {sum(parts.values()) / 1e6:.2f} MB ({told})")
    if given.json:
        told = {
            "service": asdict(costs),
            "store": asdict(StoreCosts()),
            "costs": [asdict(each) for each in found],
            "manifest_bytes": manifests,
        }
        given.json.write_text(json.dumps(told, indent=1))


def table(found: Sequence[Cost]) -> Table:
    made = Table(title="Simulated: modelled seconds, counted messages")
    for name in ("operation", "workers", "messages", "MB", "requests", "MB of the store"):
        made.add_column(name, justify="left" if name == "operation" else "right")
    for name in ("seconds", "training waits", "keeps", "faster than linear"):
        made.add_column(name, justify="right")
    by_operation: dict[str, list[Cost]] = {}
    for each in found:
        by_operation.setdefault(each.operation, []).append(each)
    for name, costs in by_operation.items():
        for before, each in zip([None, *costs], costs, strict=False):
            made.add_row(
                name,
                str(each.workers),
                f"{sum(each.messages.values())}",
                f"{each.service_bytes / 1e6:.1f}",
                f"{sum(each.requests.values())}",
                f"{each.store_bytes / 1e6:.0f}",
                f"{each.seconds:.2f}",
                f"{each.training_s:.2f}",
                str(each.kept),
                "" if before is None else grown(before, each),
            )
        made.add_section()
    return made


def grown(before: Cost, each: Cost) -> str:
    """What grew faster than the number of workers, and with which power of it."""
    told = []
    for name, first, second in (
        ("messages", sum(before.messages.values()), sum(each.messages.values())),
        ("MB", before.service_bytes, each.service_bytes),
        ("requests", sum(before.requests.values()), sum(each.requests.values())),
        ("store", before.store_bytes, each.store_bytes),
    ):
        if first and second:
            power = math.log(second / first) / math.log(each.workers / before.workers)
            if power > FASTER:
                told.append(f"{name} ^{power:.1f}")
    return ", ".join(told)


def measured() -> dict[str, float]:
    """What TensorFlow's coordination service takes on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        ended = run_workers([str(MEASURES), str(out)], 2, timeout_s=600)
        if not out.exists():
            sys.exit("\n".join(each.output for each in ended))
        found: dict[str, float] = json.loads(out.read_text())
        return found


if __name__ == "__main__":
    main()
