"""The cost of agreements, statistics, a save and a restore with many workers, in a simulation.

    python benchmarks/scale.py [--workers 8 64 512 4096] [--message-us 300] [--json FILE]
    python benchmarks/scale.py --measure [--rounds 3] [--json FILE]

The package's own code (agreements, reports, stopping, commit, store, retention) is run by simulated
workers, which are threads in simulated time: tests/support/simulated.py. The coordination service
and the store are models, whose messages and bytes are counted. `--measure` only measures the cost
of a message with TensorFlow's own service, between two processes on this machine. No such cluster
was run. Simulated and counted results are the same every time, so they have no spread.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from measured import format_spread, parser, report, show, spread  # noqa: E402
from rich.table import Table  # noqa: E402
from support.at_scale import Cost, all_costs, manifest_parts  # noqa: E402
from support.cluster import run_workers  # noqa: E402
from support.simulated import Costs, StoreCosts  # noqa: E402

MEASURES = Path(__file__).parent / "workers" / "service.py"
FASTER = 1.1  # power of the number of workers, from which growth counts as more than linear


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--workers", type=int, nargs="+", default=[8, 64, 512, 4096])
    options.add_argument("--measure", action="store_true", help="only measure TensorFlow's service")
    options.add_argument("--rounds", type=int, default=3, help="rounds of --measure")
    options.add_argument("--message-us", type=float, default=Costs.message_s * 1e6)
    given = options.parse_args()
    if given.measure:
        rounds = [measured() for _ in range(given.rounds)]
        service = {name: spread(each[name] for each in rounds) for name in rounds[0]}
        show(table_of_service(service))
        report(given, service)
        return
    costs = replace(Costs(), message_s=given.message_us / 1e6)
    found: list[Cost] = []
    for count in given.workers:
        start_s = time.monotonic()
        for each in all_costs(count, costs):
            found.append(each)
            print(each, file=sys.stderr, flush=True)
        print(f"{count} workers: simulated in {time.monotonic() - start_s:.0f} s", file=sys.stderr)
    manifests = {count: manifest_parts(count) for count in given.workers}
    numbers = {
        "service": asdict(costs),
        "store": asdict(StoreCosts()),
        "costs": [asdict(each) for each in found],
        "manifest_bytes": manifests,
    }
    show(table(found), table_of_manifests(manifests))
    report(given, numbers)


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


def table_of_manifests(manifests: Mapping[int, Mapping[str, int]]) -> Table:
    made = Table("workers", "MB", "of which", title="Manifest")
    for count, parts in manifests.items():
        shares = ", ".join(f"{name} {size / 1e6:.2f}" for name, size in parts.items())
        made.add_row(str(count), f"{sum(parts.values()) / 1e6:.2f}", shares)
    return made


def table_of_service(service: Mapping[str, dict[str, Any]]) -> Table:
    made = Table(
        "", "median (range)", title="The coordination service of TensorFlow, two processes"
    )
    for name, each in service.items():
        if name == "bytes_per_s":
            made.add_row("moves", format_spread(each, ".0f", 1e-6, " MB/s"))
        else:
            made.add_row(name.removesuffix("_s"), format_spread(each, ".3f", 1000, " ms"))
    return made


def grown(before: Cost, each: Cost) -> str:
    """Returns the costs that grew faster than the number of workers, and their exponents."""
    powers = []
    for name, first, second in (
        ("messages", sum(before.messages.values()), sum(each.messages.values())),
        ("MB", before.service_bytes, each.service_bytes),
        ("requests", sum(before.requests.values()), sum(each.requests.values())),
        ("store", before.store_bytes, each.store_bytes),
    ):
        if first and second:
            power = math.log(second / first) / math.log(each.workers / before.workers)
            if power > FASTER:
                powers.append(f"{name} ^{power:.1f}")
    return ", ".join(powers)


def measured() -> dict[str, float]:
    """Measures TensorFlow's coordination service on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        ended = run_workers([str(MEASURES), str(out)], 2, timeout_s=600)
        if not out.exists():
            sys.exit("\n".join(each.output for each in ended))
        found: dict[str, float] = json.loads(out.read_text())
        return found


if __name__ == "__main__":
    main()
