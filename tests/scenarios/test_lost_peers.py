"""Real processes without a supervisor, one of which is lost: the exits of the others."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import fault
from support.cluster import Ended, run_workers
from support.fault import Fault
from support.networks import Machine, hosts

from keras_distplug.core.events import PeerLost
from keras_distplug.core.timeouts import HEARTBEAT
from keras_distplug.runlog import log_files
from keras_distplug.storage.files import open_files

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[1] / "workers" / "lost.py"


STEP = 4  # in the second epoch
WAYS = ("own", "init", "distributed", "late")


def lose(folder: Path, workers: int, death: Fault, options: str, way: str) -> list[Ended]:
    """Returns the exits of the surviving workers."""
    fault.write(folder, [death])
    command = [str(SCRIPT), str(folder), way, *options.split()]
    by_environment = (
        {HEARTBEAT: "3"} if "save" in options else {}
    )  # otherwise passed as an argument
    ended = run_workers(command, workers, env=by_environment, timeout_s=200)
    assert [each.who for each in fault.fired(folder)] == [death.who]
    assert ended.pop(number(death)).returncode == -9
    return ended


def number(death: Fault) -> int:
    """Returns the number of the lost worker."""
    return int(death.who.removeprefix("worker-"))


def require_named(survivor: Ended, lost: int) -> None:
    """Checks that the process exited with 201, and that its last line names only the lost
    worker."""
    assert survivor.returncode == 201, survivor.output
    last = survivor.output.rpartition("PeerLostError: ")[2].splitlines()[0]
    assert re.findall(r"lost (worker-\d) \((the chief, )?[\d.]+:\d+\)", last) == [
        (f"worker-{lost}", "" if lost else "the chief, ")
    ]
    assert "Fatal Python error" not in survivor.output
    assert "Aborted" not in survivor.output


@pytest.mark.parametrize(
    ("workers", "death", "way", "options"),
    [
        (2, fault.kill(1, STEP), "own", ""),
        (2, fault.kill(0, STEP, "validation"), "init", ""),
        (2, fault.kill(1, STEP), "init", "save"),
        *(
            pytest.param(*row, marks=pytest.mark.soak)
            for row in [
                *((2, fault.kill(1, STEP), way, "") for way in WAYS[1:]),
                *((2, fault.kill(1, STEP, "validation"), way, "") for way in WAYS),
                *((2, fault.kill(1, STEP, "saving"), way, "save") for way in WAYS),
                *((2, fault.kill(1, STEP, "end"), way, "") for way in WAYS),
                *((2, fault.kill(0, STEP), "init", options) for options in ("", "save", "wait")),
                (2, fault.kill(1, STEP), "init", "wait"),
                *((3, fault.kill(lost, STEP), "init", "") for lost in range(3)),
                (3, fault.kill(0, STEP), "init", "save"),
                (3, fault.kill(1, STEP), "init", "wait"),
                (3, fault.kill(2, STEP, "validation"), "init", ""),
            ]
        ),
    ],
    ids=str,
)
def test_survivors(workers: int, death: Fault, way: str, options: str, tmp_path: Path) -> None:
    """Whichever worker is killed, at any time, the others exit with 201 and name only that one."""
    survivors = lose(tmp_path, workers, death, options, way)
    lost = number(death)
    assert len(survivors) == workers - 1
    fits, _ = log_files.read(open_files(tmp_path / "runs"), "run-0001")
    assert len(fits) == workers
    for fit in fits:
        reported = [each.event.who for each in fit.entries if isinstance(each.event, PeerLost)]
        is_logged = fit.began.rank != lost and death.moment != "end"  # `fit` writes its log
        assert [who[: len("worker-0 (")] for who in reported] == [f"worker-{lost} ("] * is_logged
    for survivor in survivors:
        require_named(survivor, lost)
        if way in ("init", "distributed"):
            assert "heartbeat: 3.0 s" in survivor.output


@contextmanager
def cut_when_due(machine: Machine, folder: Path, mended_after_secs: float | None) -> Iterator[None]:
    """Cuts the link of `machine` once its fault is due, and restores it after a time, if given."""
    is_over = threading.Event()

    def cut() -> None:
        while not fault.fired(folder):
            if is_over.wait(0.02):
                return
        machine.cut()
        (folder / "cut").touch()
        if mended_after_secs is not None:
            is_over.wait(mended_after_secs)
            machine.mend()

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize(
    ("way", "moment", "mended_after_secs"),
    [
        ("own", "step", 20),
        *(
            pytest.param(*row, marks=pytest.mark.soak)
            for row in itertools.product(WAYS, ("step", "validation", "saving", "end"), (20, None))
            if row != ("own", "step", 20)
        ),
    ],
)
def test_cut_link(
    way: str, moment: fault.Moment, mended_after_secs: int | None, tmp_path: Path
) -> None:
    """Two machines that cannot reach each other, temporarily or permanently.

    Both processes name each other and exit with 201.
    """
    fault.write(tmp_path, [Fault("cut", "worker-1", STEP, moment)])
    options = ["save"] if moment == "saving" else []
    with hosts(2) as machines, cut_when_due(machines[1], tmp_path, mended_after_secs):
        command = [str(SCRIPT), str(tmp_path), way, *options]
        ended = run_workers(command, 2, hosts=machines, env={HEARTBEAT: "3"}, timeout_s=200)
    assert [each.who for each in fault.fired(tmp_path)] == ["worker-1"]
    assert (tmp_path / "cut").exists()
    for index, survivor in enumerate(ended):
        require_named(survivor, 1 - index)


@pytest.mark.soak
def test_caught(tmp_path: Path) -> None:
    """A script that catches the error exits with its own code, or by SIGALRM if TensorFlow
    hangs."""
    [survivor] = lose(tmp_path, 2, fault.kill(1, STEP), "catch", "init")
    assert survivor.returncode in (7, -14), survivor.output
    assert "caught: worker-0 lost worker-1" in survivor.output
