"""The step that a process has reached, which outlives the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.cluster import environment

from keras_distplug.core import step_marker
from keras_distplug.core.step_marker import StepMarker
from keras_distplug.core.supervised import Supervised


def test_last_step(tmp_path: Path) -> None:
    """The last stored step is read, for the session that stored it and for any session."""
    marker = StepMarker(tmp_path / "marker", "3f0c9a1b5d", 10)
    assert step_marker.read(tmp_path / "marker") == 10
    marker.store(2**40)
    assert step_marker.read(tmp_path / "marker", "3f0c9a1b") == 2**40
    assert step_marker.read(tmp_path / "marker", "aaaaaaaa") is None
    StepMarker(tmp_path / "marker", "aaaaaaaa", 20)
    assert step_marker.read(tmp_path / "marker", "aaaaaaaa") == 20


def test_killed(tmp_path: Path) -> None:
    """A step is not lost if the process is killed immediately afterwards."""
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from keras_distplug.core.step_marker import StepMarker\n"
        "marker = StepMarker(Path(sys.argv[1]), 'a', 0)\n"
        "for step in range(1, 8): marker.store(step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "marker")]
    done = subprocess.run(command, env=environment(), timeout=60, check=False)
    assert done.returncode == -9
    assert step_marker.read(tmp_path / "marker", "a") == 7


def test_killed_at_any_time(tmp_path: Path) -> None:
    """At no time does the memory hold a number that is not a step."""
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from keras_distplug.core.step_marker import StepMarker\n"
        "reader, steps = os.getpid(), (0x0101010101, 0x0202020202)\n"
        "marker = StepMarker(Path(sys.argv[1]), 'a', steps[0])\n"
        "if (pid := os.fork()) == 0:\n"
        "    while os.getppid() == reader:\n"
        "        for step in steps: marker.store(step)\n"
        "    os._exit(0)\n"
        "found, until_s = set(), time.monotonic() + 1\n"
        "while len(found) < 2 or time.monotonic() < until_s:\n"
        "    found.update(marker._numbers[1] for _ in range(10_000))\n"
        "os.kill(pid, 9)\n"
        "assert found == set(steps), found\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "marker")]
    done = subprocess.run(
        command, env=environment(), timeout=60, check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_unknown(tmp_path: Path) -> None:
    """Without a file, or with another file in its place, the step is unknown."""
    assert step_marker.read(tmp_path / "marker") is None
    (tmp_path / "marker").write_text("something else")
    assert step_marker.read(tmp_path / "marker") is None


def test_file(tmp_path: Path) -> None:
    """All attempts of a job share one file for a run, and different runs have different files."""
    first, second = (Supervised("job", number, tmp_path / f"{number}") for number in range(2))
    assert first.step_marker("runs/a/run-0001") == second.step_marker("runs/a/run-0001")
    assert first.step_marker("runs/a/run-0001") != first.step_marker("runs/a/run-0002")
