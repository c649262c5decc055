"""Two jobs in one folder."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from support.cluster import environment
from support.processes import Process

from keras_distplug.core.exit_codes import ExitCode

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SCRIPT = str(Path(__file__).parents[1] / "workers" / "owned.py")
END_SECS = 120.0


def start(folder: Path, *how: str) -> Process:
    folder.mkdir(exist_ok=True)
    return Process([SCRIPT, str(folder), *how], environment({}))


def weights(process: Process) -> str:
    """Returns the weights of a process that succeeded."""
    assert process.wait(END_SECS) == 0, process.output()
    [found] = re.findall("^weights ([0-9a-f]{64})$", process.output(), re.MULTILINE)
    return str(found)


def await_pause(process: Process, state: str) -> None:
    """Waits until a process has paused and is asleep or stopped."""
    end_s = time.monotonic() + END_SECS
    while not ("pauses" in process.output() and state_of(process.pid) == state):
        assert process.poll() is None, process.output()
        assert time.monotonic() < end_s, process.output()
        time.sleep(0.02)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def files_in(folder: Path) -> dict[Path, bytes]:
    """Returns the files, without temporary ones, which a stopped process may be about to rename."""
    paths = (path for path in folder.rglob("*.*") if path.is_file() and path.suffix != ".tmp")
    return {path: path.read_bytes() for path in paths}


def test_live_owner(tmp_path: Path) -> None:
    """The second job is refused, naming the process that trains there; the first one is
    unaffected."""
    with start(tmp_path / "alone") as alone:
        expected = weights(alone)
    folder = tmp_path / "shared"
    folder.mkdir()
    os.mkfifo(folder / "gate")
    with start(folder, "wait") as first:
        await_pause(first, "S")
        before = files_in(folder / "runs" / "run-0001")
        with start(folder) as second:
            assert second.wait(END_SECS) == 1
            assert f"in which process {first.pid} on" in second.output()
        assert files_in(folder / "runs" / "run-0001") == before
        (folder / "gate").write_text("")
        assert weights(first) == expected


def test_zombie(tmp_path: Path) -> None:
    """A job that was stopped until another one took over saves and deletes nothing more.

    It exits with code 93, "do not restart".
    """
    with start(tmp_path / "alone") as alone:
        expected = weights(alone)
    with start(tmp_path / "shared", "stop") as first:
        await_pause(first, "T")
        with start(tmp_path / "shared") as second:
            assert weights(second) == expected
            assert f"was last used by process {first.pid} on" in second.output()
            assert "run-0001, checkpoint step-0000000" in second.output()
        before = files_in(tmp_path / "shared")
        first.send_signal(signal.SIGCONT)
        assert first.wait(END_SECS) == ExitCode.DO_NOT_RESTART
        assert f"was taken over by process {second.pid} on" in first.output()
        assert before.items() <= files_in(tmp_path / "shared").items()
        manifests = {path for path in files_in(tmp_path / "shared") if path.stem == "MANIFEST"}
        assert manifests == {path for path in before if path.stem == "MANIFEST"}
