"""Real processes without a supervisor, one of which is killed: how the others end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import fault
from support.cluster import Ended, run_workers
from support.fault import Fault

from keras_distplug.core.events import PeerLost
from keras_distplug.core.timeouts import HEARTBEAT
from keras_distplug.runlog import log_files
from keras_distplug.storage.files import open_files

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[1] / "workers" / "lost.py"


STEP = 4  # in the second epoch


def lose(folder: Path, workers: int, death: Fault, options: str) -> list[Ended]:
    """The ends of the survivors."""
    fault.write(folder, [death])
    command = [str(SCRIPT), str(folder), *options.split()]
    by_environment = {HEARTBEAT: "3"} if "save" in options else {}  # else by argument
    ended = run_workers(command, workers, env=by_environment, timeout_s=200)
    assert [each.who for each in fault.fired(folder)] == [death.who]
    assert ended.pop(number(death)).returncode == -9
    return ended


def number(death: Fault) -> int:
    """Of the worker that is lost."""
    return int(death.who.removeprefix("worker-"))


@pytest.mark.parametrize(
    ("workers", "death", "options"),
    [
        (2, fault.kill(1, STEP), ""),
        (2, fault.kill(0, STEP, "validation"), ""),
        (2, fault.kill(1, STEP), "save"),
        *(
            pytest.param(*row, marks=pytest.mark.soak)
            for row in [
                (2, fault.kill(0, STEP), ""),
                (2, fault.kill(0, STEP), "save"),
                (2, fault.kill(0, STEP), "wait"),
                (2, fault.kill(1, STEP), "wait"),
                (2, fault.kill(1, STEP, "validation"), ""),
                (3, fault.kill(0, STEP), ""),
                (3, fault.kill(1, STEP), ""),
                (3, fault.kill(2, STEP), ""),
                (3, fault.kill(0, STEP), "save"),
                (3, fault.kill(1, STEP), "wait"),
                (3, fault.kill(2, STEP, "validation"), ""),
            ]
        ),
    ],
    ids=str,
)
def test_survivors(workers: int, death: Fault, options: str, tmp_path: Path) -> None:
    """Whoever is killed and whenever, the others leave with 201, and name it and no other one."""
    survivors = lose(tmp_path, workers, death, options)
    lost = number(death)
    assert len(survivors) == workers - 1
    fits, _ = log_files.read(open_files(tmp_path), "")
    assert len(fits) == workers
    for fit in fits:
        told = [each.event.who for each in fit.entries if isinstance(each.event, PeerLost)]
        expected = [] if fit.began.rank == lost else [f"worker-{lost} ("]
        assert [who[: len("worker-0 (")] for who in told] == expected
    for survivor in survivors:
        assert survivor.returncode == 201, survivor.output
        assert "heartbeat: 3.0 s" in survivor.output
        last = survivor.output.rpartition("PeerLostError: ")[2].splitlines()[0]
        assert re.findall(r"lost (worker-\d) \((the chief, )?127\.0\.0\.1:\d+\)", last) == [
            (f"worker-{lost}", "" if lost else "the chief, ")
        ]
        assert "Fatal Python error" not in survivor.output
        assert "Aborted" not in survivor.output


@pytest.mark.soak
def test_caught(tmp_path: Path) -> None:
    """A script that catches the error ends with its own code; where TensorFlow does not come to an
    end, by SIGALRM."""
    [survivor] = lose(tmp_path, 2, fault.kill(1, STEP), "catch")
    assert survivor.returncode in (7, -14), survivor.output
    assert "caught: worker-0 lost worker-1" in survivor.output
