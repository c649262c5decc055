"""Random faults of all kinds, on workers that save checkpoints to S3 through a flaky proxy.

    python benchmarks/chaos.py [--minutes 60] [--workers 3] [--seed 0] [--json FILE]

Real processes train a small convolutional network under `keras-distplug run`, with all callbacks of
`defaults()` and a checkpoint every 5 batches in Ceph's RADOS Gateway on this machine (`--store
moto` if that is not installed). They are killed, suspended, preempted, and made to hang; writing
their shares of checkpoints fails, and written ones are damaged; requests to the store fail, break
off and stall; the data contains NaN. A fault occurs 3 to 12 batches after the previous one, drawn
from `--seed`, and one of four recoveries is hit by another fault.

When the time is over, training continues undisturbed for a few epochs. Then the same number of
workers trains the same number of epochs on the same data (with the same NaN), undisturbed, on a
local disk. The results must be bit-identical, and every fault must have been reported with its
cause and its process; otherwise the exit code is 1.

Detected: from the fault to the report by the supervisor or a watchdog. Recovered: to the end of the
first batch after the restart. Not verified on GPU, nor on several machines.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from measured import parser, report, show
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
# Replaces this folder, which contains another module `stores`.
sys.path[:1] = [str(ROOT), str(ROOT / "tests")]

from stores import servers  # noqa: E402
from stores.ceph import ceph  # noqa: E402
from support import chaos, harmed  # noqa: E402
from support.chaos import Soaked  # noqa: E402
from support.harmed import Result  # noqa: E402


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--minutes", type=float, default=60.0, help="duration of the faults")
    options.add_argument("--workers", type=int, default=3)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--store", choices=["ceph", "moto"], default="ceph")
    given = options.parse_args()
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        for name in ("store", "job"):
            (home / name).mkdir()
        start = {"ceph": ceph, "moto": servers.moto}[given.store]
        place = stack.enter_context(start(home / "store")).folder()
        soaked = chaos.soak(
            home / "job",
            seed=given.seed,
            workers=given.workers,
            secs=60 * given.minutes,
            store_port=urlsplit(place.options["endpoint_url"]).port or 0,
            directory=place.url,
            storage_options=lambda port: through(place.options, port),
            on_fault=lambda line: print(line, file=sys.stderr, flush=True),
        )
    unnamed = list(chaos.unnamed(soaked))
    show(table(soaked.ended.results))
    report(given, numbers(soaked, unnamed), *summary(soaked, unnamed))
    sys.exit(1 if soaked.differences or unnamed else 0)


def through(options: Mapping[str, Any], port: int) -> dict[str, Any]:
    """Returns options for the same store through another port."""
    return {**options, "endpoint_url": f"http://127.0.0.1:{port}"}


def table(results: Sequence[Result]) -> Table:
    made = Table(title="by kind of fault: seconds, median (95th percentile, maximum)")
    for name in ("fault", "came", "named", "detected", "recovered", "steps lost"):
        made.add_column(name, justify="left" if name == "fault" else "right")
    came = [each for each in results if each.came]
    kinds = sorted({each.fault.kind for each in came})
    for kind, those in [
        *((kind, [each for each in came if each.fault.kind == kind]) for kind in kinds),
        ("all", came),
    ]:
        made.add_row(
            kind,
            str(len(those)),
            "" if kind == "flaky_store" else str(sum(each.is_named for each in those)),
            spread([each.detected_secs for each in those]),
            spread([each.recovered_secs for each in those]),
            str(sum(each.steps_lost or 0 for each in those)),
        )
    return made


def spread(secs: Sequence[float | None]) -> str:
    known = sorted(each for each in secs if each is not None)
    if not known:
        return ""
    high = known[min(len(known) - 1, round(0.95 * (len(known) - 1)))]
    return f"{statistics.median(known):.1f} ({high:.1f}, {known[-1]:.1f})"


def summary(soaked: Soaked, unnamed: Sequence[str]) -> list[str]:
    results = soaked.ended.results
    came = [each for each in results if each.came]
    restarts = [each for each in came if harmed.KINDS[each.fault.kind].restarts]
    lost = sum(each.steps_lost or 0 for each in came)
    where = ", ".join(
        f"{name} {100 * secs / sum(soaked.secs.values()):.1f} %"
        for name, secs in sorted(soaked.secs.items(), key=lambda each: -each[1])
        if secs
    )
    lines = [
        f"{len(came)} faults in {soaked.wall_secs / 60:.1f} minutes, {len(restarts)} of which "
        f"ended the workers; {soaked.requests_harmed} requests to the store harmed",
        f"{soaked.epochs} epochs of {chaos.BATCHES} batches; {lost} batches trained again",
        f"goodput {100 * soaked.goodput:.1f} % ({where})",
        f"the result compared with an undisturbed run: "
        f"{'bit-identical' if not soaked.differences else soaked.differences}",
    ]
    return [*lines, *(f"not named: {each}" for each in unnamed)]


def numbers(soaked: Soaked, unnamed: Sequence[str]) -> dict[str, object]:
    return {
        "results": [asdict(each) for each in soaked.ended.results if each.came],
        "unnamed": list(unnamed),
        "differences": soaked.differences,
        "requests_harmed": soaked.requests_harmed,
        "wall_secs": soaked.wall_secs,
        "epochs": soaked.epochs,
        "goodput": soaked.goodput,
        "secs": dict(soaked.secs),
    }


if __name__ == "__main__":
    main()
