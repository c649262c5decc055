"""Seconds from a fault until training goes on, and what of it has to be done again.

    python benchmarks/recovery.py [--rounds 1] [--only stopped] [--json FILE]

A training of 120 batches, each of which takes 50 ms (by a sleep, so that it takes that whatever
else runs), saved each 20 batches, is hit in the 90th by a fault that its own process makes. Ours
runs under `keras-distplug run`, with the callbacks of `defaults()` and `HangWatchdog(step_secs=5,
save_secs=5)`; its rival is a script with Keras' `BackupAndRestore(save_freq=20)` in a loop of the
shell, `until python train.py; do :; done`, on one process: on several workers Keras 3 does not run
(keras-team/keras#20585). Both begin again with a new process, which imports TensorFlow.

- again: from the fault until the first process of the next attempt starts;
- batch: until that attempt has done a batch;
- made up: until it has done one that had not been done before the fault;
- lost: how many batches it does again.

Keras' callback begins the epoch anew, with the weights of its last save. Of a hang it knows
nothing; it is watched for three times as long as ours takes at most.

Processes on one machine, no GPU, no cluster.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

BATCH_S, EPOCH, EPOCHS, SAVE_EACH = 0.05, 60, 2, 20
HIT = 90
LIMIT_S = 5.0
PATIENCE_S = 90.0
HANGS = ("stopped", "locked", "input", "astray")


@dataclass(frozen=True)
class Case:
    """A fault, and whom it hits."""

    fault: str
    workers: int
    victim: int

    @property
    def place(self) -> str:
        if self.workers == 1:
            return "one process"
        return f"{'chief' if self.victim == 0 else 'other'} of {self.workers}"


CASES = (
    *(Case(fault, 1, 0) for fault in ("killed", "crashed", "told", "locked", "input")),
    *(Case(fault, 2, 1) for fault in ("killed", "crashed", "told", *HANGS)),
    *(Case(fault, 2, 0) for fault in ("killed", "told", "stopped")),
)
WHAT = {
    "killed": "SIGKILL",
    "crashed": "SIGSEGV",
    "told": "SIGTERM",
    "stopped": "SIGSTOP",
    "locked": "interpreter's lock kept in C",
    "input": "input that never comes",
    "astray": "a collective that nobody else calls",
}


@dataclass(frozen=True)
class Recovery:
    """What came of a fault; None for what has not come within `watched_s`."""

    again_s: float | None
    batch_s: float | None
    made_up_s: float | None
    lost: int | None
    watched_s: float


# In the processes that train


def train(whose: str, folder: Path, fault: str, victim: int) -> None:
    began_s = time.time()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import keras
    import numpy as np

    import keras_distplug as kd

    strategy = kd.init() if whose == "ours" else None
    task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"index": 0})
    events = Events(folder / f"events-{task['index']}", began_s)
    hit = Hit(events, folder, fault if task["index"] == victim else "", strategy)

    class Batches(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return EPOCH

        def __getitem__(self, number: int) -> tuple[Any, Any]:
            if events.step // EPOCH == HIT // EPOCH and number == HIT % EPOCH:
                hit("input")
            draw = np.random.default_rng(number)
            return draw.normal(size=(32, 16)), draw.normal(size=(32, 1))

    class Each(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch
            events.step = epoch * EPOCH

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            time.sleep(BATCH_S)
            events.note(self.epoch * EPOCH + batch + 1)
            # Where the others wait for a word about the save, nobody calls a collective.
            if events.step == (HIT + SAVE_EACH // 2 if fault == "astray" else HIT):
                hit("killed", "crashed", "told", "stopped", "locked", "astray")

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    if whose == "ours":
        callbacks = [
            Each(),
            *kd.defaults(folder / "run", save_freq=SAVE_EACH),
            kd.HangWatchdog(step_secs=LIMIT_S, save_secs=LIMIT_S),
        ]
        kd.distributed_fit(
            model, Batches(), epochs=EPOCHS, shuffle=False, callbacks=callbacks, verbose=0
        )
    else:
        backup = keras.callbacks.BackupAndRestore(str(folder / "backup"), save_freq=SAVE_EACH)
        model.fit(Batches(), epochs=EPOCHS, shuffle=False, callbacks=[backup, Each()], verbose=0)


class Events:
    """What one process has done, and when: a line each."""

    def __init__(self, path: Path, began_s: float) -> None:
        self._path = path
        self.step = 0
        self._write(f"begin {began_s}")

    def note(self, step: int) -> None:
        self.step = step
        self._write(f"{step} {time.time()}")

    def _write(self, line: str) -> None:
        with open(self._path, "a") as file:
            file.write(f"{line}\n")


class Hit:
    """Makes the fault, in the first attempt."""

    def __init__(self, events: Events, folder: Path, fault: str, strategy: Any) -> None:
        self._events = events
        self._path = folder / "fault"
        self._fault = fault
        self._strategy = strategy

    def __call__(self, *faults: str) -> None:
        if self._fault not in faults or self._path.exists():
            return
        self._path.write_text(f"{time.time()}")
        acts: dict[str, Callable[[], object]] = {
            "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "crashed": lambda: os.kill(os.getpid(), signal.SIGSEGV),
            "told": lambda: os.kill(os.getpid(), signal.SIGTERM),
            "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "locked": lambda: ctypes.PyDLL(None).sleep(10_000),
            "input": lambda: threading.Event().wait(),
            "astray": self._astray,
        }
        acts[self._fault]()

    def _astray(self) -> None:
        import tensorflow as tf

        def all_reduce() -> Any:
            return tf.distribute.get_replica_context().all_reduce("sum", tf.ones(()))

        self._strategy.run(all_reduce)


# In the process that measures


def measure(case: Case, whose: str) -> Recovery:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = [sys.executable, __file__, "--train", whose, name, case.fault, str(case.victim)]
        if whose == "ours":
            run = [sys.executable, "-m", "keras_distplug", "run"]
            command = [*run, "--workers", str(case.workers), "--", *script]
        else:
            command = ["bash", "-c", f"until {shlex.join(script)}; do :; done"]
        root = str(Path(__file__).resolve().parents[1])
        paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        with open(folder / "printed", "wb") as printed:
            process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": paths},
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                found = watch(folder, case, process, is_rival=whose != "ours")
            finally:
                os.killpg(process.pid, signal.SIGKILL)  # a guard ends what the supervisor started
                process.wait()
        return found


def watch(folder: Path, case: Case, process: subprocess.Popen[bytes], is_rival: bool) -> Recovery:
    limit_s = 3 * 2 * LIMIT_S if is_rival and case.fault in HANGS else PATIENCE_S
    began_s = time.time()
    while time.time() - began_s < PATIENCE_S:
        if (folder / "fault").exists() and (text := (folder / "fault").read_text()):
            break
        if process.poll() is not None:
            break
        time.sleep(0.1)
    else:
        text = ""
    if not text:
        raise SystemExit(f"{case} has not been hit:\n{(folder / 'printed').read_text()}")
    hit_s = float(text)
    while (found := judge(folder, hit_s, limit_s)).made_up_s is None:
        if time.time() - hit_s > limit_s:
            return found
        time.sleep(0.1)
    return found


def judge(folder: Path, hit_s: float, watched_s: float) -> Recovery:
    begins, attempts = [], []
    for path in sorted(folder.glob("events-*")):
        steps: list[list[tuple[int, float]]] = []
        for line in path.read_text().splitlines():
            what, at = line.split()
            if what == "begin":
                steps.append([])
                if float(at) > hit_s:
                    begins.append(float(at) - hit_s)
            else:
                steps[-1].append((int(what), float(at)))
        attempts.append(steps)
    chiefs = attempts[0]
    if len(chiefs) < 2 or not chiefs[1]:
        return Recovery(min(begins, default=None), None, None, None, watched_s)
    done = chiefs[0][-1][0]
    first, first_s = chiefs[1][0]
    new = [at for step, at in chiefs[1] if step > done]
    return Recovery(
        min(begins),
        first_s - hit_s,
        new[0] - hit_s if new else None,
        max(done - first + 1, 0),
        watched_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", choices=WHAT, help="this fault")
    parser.add_argument("--workers", type=int, default=2, help="where there are several")
    parser.add_argument("--json", help="write the numbers to this file, too")
    parser.add_argument("--train", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        whose, folder, fault, victim = arguments.train
        train(whose, Path(folder), fault, int(victim))
        return
    cases = [
        case if case.workers == 1 else Case(case.fault, arguments.workers, case.victim)
        for case in CASES
        if arguments.only in (None, case.fault)
    ]
    found: dict[tuple[Case, str], list[Recovery]] = {}
    for number in range(arguments.rounds):
        for case in cases:
            for whose in ("ours", "keras") if case.workers == 1 else ("ours",):
                found.setdefault((case, whose), []).append(measure(case, whose))
                print(number, case.fault, case.place, whose, found[case, whose][-1], flush=True)
    show(found)
    if arguments.json:
        rows = [
            {**asdict(case), "whose": whose, "rounds": [asdict(each) for each in rounds]}
            for (case, whose), rounds in found.items()
        ]
        names = ("tensorflow-cpu", "tensorflow", "keras")
        machine = {"processors": os.cpu_count(), "python": platform.python_version()}
        Path(arguments.json).write_text(
            json.dumps({"recovery": rows, "machine": machine, "versions": versions(names)})
        )


def versions(names: tuple[str, ...]) -> dict[str, str]:
    installed = {each.metadata["Name"].lower(): each.version for each in metadata.distributions()}
    return {name: installed[name] for name in names if name in installed}


def show(found: dict[tuple[Case, str], list[Recovery]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("fault", "hits", "whose", "again", "batch", "made up", "lost")
    for (case, whose), rounds in found.items():
        cells = [
            _median([getattr(each, name) for each in rounds], unit, rounds[0].watched_s)
            for name, unit in (("again_s", " s"), ("batch_s", " s"), ("made_up_s", " s"))
        ]
        lost = [each.lost for each in rounds if each.lost is not None]
        cells.append(f"{statistics.median(lost):g}" if lost else "all")
        limit = f", found after {LIMIT_S:g} s" if case.fault in HANGS else ""
        table.add_row(WHAT[case.fault] + limit, case.place, whose, *cells)
    Console(width=120).print(table)


def _median(values: list[float | None], unit: str, watched_s: float) -> str:
    if any(value is None for value in values):
        return f"not in {watched_s:g}{unit}"
    return f"{statistics.median(value for value in values if value is not None):.1f}{unit}"


if __name__ == "__main__":
    main()
