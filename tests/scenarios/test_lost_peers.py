"""Real processes without a supervisor, one of which is killed: how the others end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.cluster import Ended, run_workers

from keras_distplug.core.events import PeerLost
from keras_distplug.core.timeouts import HEARTBEAT
from keras_distplug.storage import run_log
from keras_distplug.storage.files import open_files

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[1] / "workers" / "lost.py"


def lose(folder: Path, workers: int, lost: int, *moment: str) -> list[Ended]:
    """The ends of the survivors."""
    command = [str(SCRIPT), str(folder), str(lost), *moment]
    by_environment = {HEARTBEAT: "3"} if "save" in moment else {}  # else by argument
    ended = run_workers(command, workers, env=by_environment, timeout_s=200)
    assert (folder / "killed").exists()
    assert ended.pop(lost).returncode == -9
    return ended


@pytest.mark.parametrize(
    ("workers", "lost", "moment"),
    [
        (2, 1, "step"),
        (2, 0, "validation"),
        (2, 1, "save"),
        *(
            pytest.param(*row, marks=pytest.mark.soak)
            for row in [
                (2, 0, "step"),
                (2, 0, "save"),
                (2, 0, "callback"),
                (2, 1, "callback"),
                (2, 1, "validation"),
                (3, 0, "step"),
                (3, 1, "step"),
                (3, 2, "step"),
                (3, 0, "save"),
                (3, 1, "callback"),
                (3, 2, "validation"),
            ]
        ),
    ],
)
def test_survivors(workers: int, lost: int, moment: str, tmp_path: Path) -> None:
    """Whoever is killed and whenever, the others leave with 201, and name it and no other one."""
    survivors = lose(tmp_path, workers, lost, moment)
    assert len(survivors) == workers - 1
    fits, _ = run_log.read(open_files(tmp_path), "")
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
    [survivor] = lose(tmp_path, 2, 1, "step", "caught")
    assert survivor.returncode in (7, -14), survivor.output
    assert "caught: worker-0 lost worker-1" in survivor.output
