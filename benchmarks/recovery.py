"""Recovery times after faults, compared with Keras' BackupAndRestore in a shell's restart loop.

    python benchmarks/recovery.py [--workers 2] [--rounds 1] [--only FAULT ...] [--json FILE]

Real processes train a perceptron (steps of about 50 ms of matrix multiplications: 1024 samples,
0.56 M weights) in epochs of 40 batches, with a save every 20. After batch 30 of the second epoch, a
process injects a fault into itself; once the lost steps are made up for, the next fault occurs in
the next epoch, and so on. Ours runs under `keras-distplug run --unresponsive-timeout 10`, with a
`PreemptionHandler` and a `HangWatchdog(step_secs=5, save_secs=5)`, with a fault in every third
epoch only, so that the fork server has finished its imports; and again with `--no-fork-server`. The
rival runs under `until python plain.py; do :; done`, in one process: Keras 3 cannot run it on
several workers (keras-team/keras#20585). Rounds are interleaved; the tables show medians, with the
minimum and maximum of several rounds. Times are measured from the fault:

- starts again: to the first line of the script in the next process;
- first batch: to the end of its first batch;
- made up for: to the end of the first batch beyond the last one before the fault;
- steps lost: the number of batches that are trained again.

The hanging input is requested a few steps before training needs it. The rival cannot detect hangs:
it is killed after 15 s, three times the limit for a step; ours would be killed after 30 s. The
times are recorded by the workers at the end of every batch. Not verified on GPU.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from measured import format_spread, parser, report, show, spread
from rich.table import Table
from workers.events import EPOCH_STEPS, STEP_SECS, Event, read

SCRIPTS = Path(__file__).parent / "workers"
POLL_S = 0.05
PATIENCE_S = 180.0  # for an expected event

OURS, RIVAL = "keras_distplug", "BackupAndRestore in a loop"
COLD = "keras_distplug, --no-fork-server"
# Without a restart by then, the fault counts as not handled. Ours also asks other workers for 5 s.
GIVEN_UP_S = {OURS: 6.0 * STEP_SECS, COLD: 6.0 * STEP_SECS, RIVAL: 3.0 * STEP_SECS}
TIMES = ("starts_again_s", "first_batch_s", "made_up_s")
# The number of epochs from one fault to the next.
EVERY = {OURS: 3, COLD: 1, RIVAL: 1}


@dataclass(frozen=True)
class Fault:
    """A fault that a process injects into itself."""

    title: str
    hangs: bool = False
    needs_others: bool = False


# SIGTERM must be last: ours saves after it, and counts the batches to the next save from there.
FAULTS = {
    "SIGKILL": Fault("SIGKILL"),
    "SIGSEGV": Fault("SIGSEGV"),
    "SIGSTOP": Fault("SIGSTOP", hangs=True),
    "lock": Fault("C code keeps the GIL", hangs=True),
    "input": Fault("input does not come", hangs=True),
    "collective": Fault("collective of one worker", hangs=True, needs_others=True),
    "SIGTERM": Fault("SIGTERM"),
}


@dataclass(frozen=True)
class SetUp:
    """The number of processes, and the one that the faults hit."""

    workers: int
    hit: int

    @property
    def title(self) -> str:
        if self.workers == 1:
            return "one process"
        return f"{self.workers} workers, {'another' if self.hit else 'the chief'}"


@dataclass(frozen=True)
class Recovery:
    """The recovery from one fault. Times are in seconds from the fault.

    Args:
        starts_again_s: The time until the next process started.
        first_batch_s: The time until the end of its first batch.
        made_up_s: The time until the first batch beyond the last one before the fault.
        steps_lost: The number of batches that were trained again.
        steps_twice: The number of these batches that the restored weights already included.
        goes_on_at: The index of the first batch in its epoch, from 0.
    """

    starts_again_s: float
    first_batch_s: float
    made_up_s: float
    steps_lost: int
    steps_twice: int
    goes_on_at: int


@dataclass(frozen=True)
class Waited:
    """A fault after which no process was started within this many seconds."""

    seconds: float


Outcome = Recovery | Waited


def recovery(events: Sequence[Event], attempt: int) -> Recovery | None:
    """Returns the recovery from the fault of an attempt, once the lost steps are made up for."""
    [fault] = (each for each in events if (each.what, each.attempt) == ("fault", attempt))
    batches = [each for each in events if each.what == "batch"]
    before = [each for each in batches if each.attempt == attempt]
    last = max(before, key=lambda each: each.step)
    # All workers finish a batch at the same time, so the chief's events stand for all.
    after = [each for each in batches if (each.attempt, each.worker) == (attempt + 1, 0)]
    beyond = next((each for each in after if each.step > last.step), None)
    if beyond is None:
        return None
    start = min(e.at_s for e in events if (e.what, e.attempt) == ("start", attempt + 1))
    first = after[0]
    return Recovery(
        starts_again_s=start - fault.at_s,
        first_batch_s=first.at_s - fault.at_s,
        made_up_s=beyond.at_s - fault.at_s,
        steps_lost=last.step - first.step + 1,
        steps_twice=(first.iterations - first.step) - (last.iterations - last.step),
        goes_on_at=(first.step - 1) % EPOCH_STEPS,
    )


@contextlib.contextmanager
def running(subject: str, set_up: SetUp, faults: Sequence[str], folder: Path) -> Iterator[Job]:
    arguments = [str(folder), str(set_up.hit), str(EVERY[subject]), *faults]
    if subject != RIVAL:
        options = ["--workers", str(set_up.workers), "--max-restarts", str(len(faults))]
        options += ["--unresponsive-timeout", "10", *["--no-fork-server"] * (subject == COLD)]
        command = [sys.executable, "-m", "keras_distplug", "run", *options, "--"]
        command += [sys.executable, str(SCRIPTS / "ours.py"), *arguments]
    else:
        command = ["bash", "-c", 'until "$@"; do :; done', "bash"]
        command += [sys.executable, str(SCRIPTS / "plain.py"), *arguments]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("TF_CONFIG", "SLURM_"))}
    environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Job(process, folder)
    finally:
        with contextlib.suppress(ProcessLookupError):
            # The guard of `keras-distplug run` then ends its workers.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass(frozen=True)
class Job:
    """A training under a program that restarts it."""

    process: subprocess.Popen[bytes]
    folder: Path

    def outcome(self, attempt: int, give_up_s: float) -> Outcome:
        """Waits for the fault of an attempt, and for its outcome."""
        if not self._came("fault", attempt, PATIENCE_S):
            raise self.failure(f"fault {attempt} has not come")
        if not self._came("start", attempt + 1, give_up_s):
            return Waited(give_up_s)
        end_s = time.monotonic() + PATIENCE_S
        while True:
            is_over = time.monotonic() > end_s or self.process.poll() is not None
            found = recovery(read(self.folder), attempt)
            if found is not None:
                return found
            if is_over:
                ended = self.process.returncode
                raise self.failure(
                    f"the steps lost by fault {attempt} were not made up for; the job "
                    f"{'still runs' if ended is None else f'has ended with {ended}'}"
                )
            time.sleep(POLL_S)

    def _came(self, what: str, attempt: int, within_s: float) -> bool:
        end_s = time.monotonic() + within_s
        while not any((e.what, e.attempt) == (what, attempt) for e in read(self.folder)):
            if time.monotonic() > end_s:
                return False
            if self.process.poll() is not None:
                raise self.failure(f"the job has ended with {self.process.returncode}")
            time.sleep(POLL_S)
        return True

    def end(self) -> None:
        """Waits for the end of training, which must succeed."""
        if code := self.process.wait(PATIENCE_S):
            raise self.failure(f"the job has ended with {code}")

    def failure(self, what: str) -> RuntimeError:
        printed = (self.folder / "output").read_text(errors="replace")
        return RuntimeError(f"{what}; the last that was printed:\n{printed[-3000:]}")


def measure(
    subject: str, set_up: SetUp, faults: Sequence[str]
) -> tuple[dict[str, Outcome], list[float]]:
    """Returns the outcomes of all faults, and the times between batches. A fault without recovery
    ends the job; the remaining faults are injected into another job."""
    found: dict[str, Outcome] = {}
    steps_s: list[float] = []
    while left := [name for name in faults if name not in found]:
        with tempfile.TemporaryDirectory(prefix="recovery-") as temporary:
            folder = Path(temporary)
            with running(subject, set_up, left, folder) as job:
                for attempt, name in enumerate(left):
                    found[name] = job.outcome(attempt, GIVEN_UP_S[subject])
                    if isinstance(found[name], Waited):
                        break
                else:
                    job.end()
            steps_s += times_of_steps(read(folder))
    return found, steps_s


def times_of_steps(events: Sequence[Event]) -> list[float]:
    batches = [each for each in events if (each.what, each.worker) == ("batch", 0)]
    return [b.at_s - a.at_s for a, b in pairwise(batches) if a.attempt == b.attempt]


def shown(outcomes: Sequence[Outcome] | None) -> list[str]:
    """Returns four columns of the table."""
    if outcomes is None:
        return ["does not run", "", "", ""]
    recoveries = [each for each in outcomes if isinstance(each, Recovery)]
    waited = [each for each in outcomes if isinstance(each, Waited)]
    if waited:
        also = f", {len(recoveries)} of {len(outcomes)} did" if recoveries else ""
        return ["never", f"> {waited[0].seconds:.0f} s{also}", "", ""]
    times = [
        format_spread(spread(getattr(e, name) for e in recoveries), ".1f", unit=" s")
        for name in TIMES
    ]
    return [*times, format_spread(spread(each.steps_lost for each in recoveries), "g")]


def table_of(found: Mapping[tuple[str, SetUp], Mapping[str, Sequence[Outcome]]]) -> Table:
    table = Table(title="from a fault: medians (range of the rounds)", caption=f"{OURS} | {RIVAL}")
    table.add_column("fault")
    table.add_column("process hit")
    table.add_column("timeout")
    for subject in ("", "rival: "):
        for heading in ("starts again", "first batch", "made up for", "steps lost"):
            table.add_column(subject + heading, justify="right")
    for name, fault in FAULTS.items():
        for (subject, set_up), outcomes in found.items():
            if subject != RIVAL and name in outcomes:
                rival = found[RIVAL, set_up][name] if (RIVAL, set_up) in found else None
                timeout = f"{STEP_SECS} s" if fault.hangs else ""
                title = set_up.title + ", --no-fork-server" * (subject == COLD)
                table.add_row(fault.title, title, timeout, *shown(outcomes[name]), *shown(rival))
    return table


def resume_positions(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    recoveries = [each for of in outcomes.values() for each in of if isinstance(each, Recovery)]
    if not recoveries:
        return "never resumes"
    places = sorted({each.goes_on_at for each in recoveries})
    lost = sum(each.steps_lost for each in recoveries)
    twice = sum(each.steps_twice for each in recoveries)
    return (
        f"resumes after batch {', '.join(map(str, places))} of the epoch; of {lost} batches that "
        f"were trained again, the restored weights already included {twice}"
    )


def numbers(outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    """Returns the data for JSON: all rounds of all faults, and the spread of the recovery times."""
    found: dict[str, Any] = {}
    for name, of in outcomes.items():
        recoveries = [each for each in of if isinstance(each, Recovery)]
        times = {
            each: spread(getattr(one, each) for one in recoveries) for each in TIMES if recoveries
        }
        found[name] = {"rounds": [asdict(each) for each in of], **times}
    return found


def set_ups(workers: int) -> dict[SetUp, list[str]]:
    """Returns the faults for every set-up."""
    if workers == 1:
        return {SetUp(1, 0): [n for n, fault in FAULTS.items() if not fault.needs_others]}
    return {SetUp(workers, hit): list(FAULTS) for hit in (0, workers - 1)}


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--workers", type=int, default=2, help="also measured: one process; 1: only that"
    )
    options.add_argument("--rounds", type=int, default=1)
    options.add_argument(
        "--only", choices=list(FAULTS), nargs="+", metavar="FAULT", help=", ".join(FAULTS)
    )
    arguments = options.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # core files of SIGSEGV are useless and slow
    jobs = {
        (subject, set_up): [
            name
            for name in (["SIGKILL"] if subject == COLD else faults)
            if arguments.only is None or name in arguments.only
        ]
        for set_up, faults in (set_ups(1) | set_ups(arguments.workers)).items()
        for subject in ((OURS, COLD, RIVAL) if set_up.workers == 1 else (OURS, COLD))
    }
    found: dict[tuple[str, SetUp], dict[str, list[Outcome]]] = {
        job: {name: [] for name in faults} for job, faults in jobs.items()
    }
    steps_s: dict[tuple[str, SetUp], list[float]] = {job: [] for job in jobs}
    for _ in range(arguments.rounds):
        for job, faults in jobs.items():
            outcomes, taken = measure(*job, faults)
            for name, outcome in outcomes.items():
                found[job][name].append(outcome)
            steps_s[job] += taken
    notes, results = [], []
    for (subject, set_up), outcomes in found.items():
        if not outcomes:
            continue
        step_s = statistics.median(steps_s[subject, set_up])
        notes.append(
            f"{subject}, {set_up.title}: steps of {1000 * step_s:.0f} ms; "
            f"{resume_positions(outcomes)}"
        )
        results.append(
            {"subject": subject, **asdict(set_up), "step_s": step_s, "found": numbers(outcomes)}
        )
    show(table_of(found))
    report(arguments, results, *notes)


if __name__ == "__main__":
    main()
