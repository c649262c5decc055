"""Every kind of fault in every set-up: its report, the time until then, and its cost.

    python benchmarks/reliability.py [--only "2 workers"] [--json FILE]

The matrix of tests/scenarios/test_fault_matrix.py, and with three workers: real processes under
`keras-distplug run`, with all callbacks of `defaults()`, a checkpoint every 4 batches, and limits
of 10 s for a step and 15 s for a callback. The faults of a job occur one after another. Detected:
from the fault to the first report by the supervisor or a watchdog that names it. Recovered: to the
end of the first batch after the restart. The exit code is 0 only if all faults occurred and were
named, and the result of every job is bit for bit that of an undisturbed one (with parameter
servers: all steps were taken). Not verified on GPU.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from measured import parser, report, show
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
# Replaces this folder, which contains another module `stores`.
sys.path[:1] = [str(ROOT), str(ROOT / "tests")]

from support import fault_matrix, harmed  # noqa: E402
from support.fault_matrix import ALL, Faults  # noqa: E402
from support.harmed import Ended, Job, Result, SetUp  # noqa: E402

TIMEOUT_S = 900.0


def main() -> None:
    options = parser(__doc__)
    titles = list(dict.fromkeys(set_up.title for set_up, _ in ALL))
    options.add_argument("--only", choices=titles, nargs="+", default=titles, metavar="SET-UP")
    given = options.parse_args()
    found: list[tuple[SetUp, Result]] = []
    wrong: list[str] = []
    expected: dict[str, Ended] = {}
    for set_up, faults in ALL:
        if set_up.title not in given.only:
            continue
        ended = trained(set_up, faults)
        found += [(set_up, each) for each in ended.results]
        told = list(fault_matrix.wrong(ended.results, job_of(set_up, "")))
        if not set_up.servers:
            if set_up.title not in expected:
                expected[set_up.title] = trained(set_up, fault_matrix.data)
            undisturbed = expected[set_up.title].outcomes[0]
            for outcome in ended.outcomes:
                told += harmed.differences(outcome, undisturbed)
        wrong += [f"{set_up.title}, {faults.__name__}: {each}" for each in told]
        print(f"{set_up.title}: {faults.__name__}", file=sys.stderr, flush=True)
    show(table(found))
    results = [{"set_up": set_up.title, **asdict(each)} for set_up, each in found]
    report(given, {"results": results, "wrong": wrong}, *wrong)
    sys.exit(1 if wrong else 0)


def job_of(set_up: SetUp, directory: str) -> Job:
    return Job(set_up, directory, epochs=fault_matrix.epochs(set_up))


def trained(set_up: SetUp, faults: Faults) -> Ended:
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        job = job_of(set_up, f"{folder}/runs")
        of = faults(set_up.workers - 1)
        return harmed.run(Path(folder), job, of, timeout_s=TIMEOUT_S)


def table(found: Sequence[tuple[SetUp, Result]]) -> Table:
    made = Table(title="seconds, and steps that were trained again")
    for name in ("set-up", "fault", "detected", "recovered", "steps lost", "named as"):
        is_text = name in ("set-up", "fault", "named as")
        made.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    for set_up, each in found:
        made.add_row(
            set_up.title,
            str(each.fault),
            _shown(each.detected_secs),
            _shown(each.recovered_secs),
            "" if each.steps_lost is None else str(each.steps_lost),
            " ".join((each.cause or "").split())[:60],
        )
    return made


def _shown(secs: float | None) -> str:
    return "" if secs is None else f"{secs:.1f}"


if __name__ == "__main__":
    main()
