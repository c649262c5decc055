"""Parameter servers as real processes: deaths and their cost."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.cluster import environment, run_workers
from support.job import Job
from support.watched import Watched

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[1] / "workers" / "scheduled.py"
SPLIT = SCRIPT.with_name("split.py")
LIMIT_S = 150.0
STEPS, BATCH = 200, 32
SAVED_EVERY = 50


def job(folder: Path, gone_s: float = LIMIT_S) -> Job:
    """Returns a job whose servers run for `gone_s` seconds after the chief."""
    env = {"KERAS_DISTPLUG_CHIEF_GONE_SECS": str(gone_s)}
    return Job(folder, [str(SCRIPT), str(folder)], 2, env)


def batches(folder: Path) -> list[str]:
    file = folder / "batches"
    return file.read_text().splitlines() if file.exists() else []


def outcome(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "outcome.json").read_text())
    return found


def test_killed_worker(tmp_path: Path) -> None:
    """A worker is killed mid-epoch: the other one continues, and the restarted one joins in.

    The epoch has all its steps. At most the killed worker's current step is repeated.
    """
    (tmp_path / "wait").touch()
    with job(tmp_path) as running:
        running.await_(lambda: len(batches(tmp_path)) > 30, LIMIT_S)
        running.kill("worker", 1)
        assert running.wait("worker", 1, 30) == -signal.SIGKILL
        running.start("worker", 1)
        again = running.output("worker", 1)
        running.await_(lambda: again.read_text().count("serves") == 2, LIMIT_S)
        assert len(batches(tmp_path)) <= 2 + STEPS // 2
        (tmp_path / "wait").unlink()
        assert running.wait("chief", 0, LIMIT_S) == 0, running.output_ends()
    found = outcome(tmp_path)
    assert found["readers"] == [1, 2]
    assert 0 <= found["steps"] - 2 * STEPS <= 1
    assert found["evaluate"][1] > 0.95


def test_killed_parameter_server(tmp_path: Path) -> None:
    """The variables are lost with the server: the chief names it and exits with 201.

    `test_supervised` restarts such a job.
    """
    with job(tmp_path) as running:
        running.await_(lambda: len(batches(tmp_path)) > 30, LIMIT_S)
        running.kill("ps", 0)
        assert running.wait("chief", 0, 60) == 201, running.output_ends()
        assert "PeerLostError: chief-0 lost ps-0" in running.output("chief", 0).read_text()


def test_preempted_together(tmp_path: Path) -> None:
    """SIGTERM to the chief: it saves after all scheduled steps and exits with 143.

    The restarted job repeats no step, counts every sample of its epoch, and learns. All processes
    then exit on their own, the servers some time after the chief.
    """
    with job(tmp_path) as running:
        running.await_(lambda: len(batches(tmp_path)) > 60, LIMIT_S)
        running.kill("chief", 0, signal.SIGTERM)
        assert running.wait("chief", 0, 60) == 143, running.output_ends()
        saved = re.findall(r"checkpoint of step (\d+)", running.output("chief", 0).read_text())
        for task in running.tasks[1:]:
            running.kill(*task, signal.SIGTERM)
            assert running.wait(*task, 10) == -signal.SIGTERM
    done = len(batches(tmp_path)) - 1
    with job(tmp_path, gone_s=1) as running:
        assert running.wait("chief", 0, LIMIT_S) == 0, running.output_ends()
        for task in running.tasks[1:]:
            assert running.wait(*task, 60) == 0, running.output_ends()
        assert "the chief has been unreachable for 1 s" in running.output("ps", 0).read_text()
    found = outcome(tmp_path)
    assert (found["began"], found["steps"]) == (done, 2 * STEPS)
    assert (found["samples"], saved) == (STEPS * BATCH, [str(done)])
    assert found["evaluate"][1] > 0.95


@contextmanager
def supervised(folder: Path) -> Iterator[Watched]:
    options = ["--workers=2", "--ps=1", f"--log={folder / 'events'}"]
    command = [
        sys.executable,
        "-m",
        "keras_distplug",
        "run",
        *options,
        "--",
        sys.executable,
        str(SCRIPT),
    ]
    running = Watched([*command, str(folder)], environment({}), folder)
    try:
        yield running
    finally:
        running.kill()


def test_supervised(tmp_path: Path) -> None:
    """Under `keras-distplug run`, a killed worker is restarted on its own.

    A killed parameter server costs the steps since the newest checkpoint. No manual work is needed.
    """
    (tmp_path / "wait").touch()

    def pids(name: str) -> list[int]:
        return [int(pid) for pid in re.findall(rf"\[{name}\] pid (\d+)", running.output)]

    with supervised(tmp_path) as running:
        running.await_(lambda: len(batches(tmp_path)) > 30, LIMIT_S)
        [killed] = pids("worker-1")
        os.kill(killed, signal.SIGKILL)
        running.await_(lambda: len(pids("worker-1")) == 2, LIMIT_S)
        (tmp_path / "wait").unlink()
        running.await_(lambda: len(batches(tmp_path)) > 1 + STEPS + 70, LIMIT_S)
        [killed] = pids("ps-0")
        os.kill(killed, signal.SIGKILL)
        done = len(batches(tmp_path)) - 1
        assert running.code(LIMIT_S) == 0, running.output
    reported = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    alone = [
        (each["worker"], each["exit_code"]) for each in reported if each["event"] == "started_again"
    ]
    assert alone == [("worker-1", 137)]
    failed = [each for each in reported if each["event"] == "failed"]
    assert (failed[0]["worker"], failed[0]["exit_code"]) == ("ps-0", 137)
    assert {each["attempt"] for each in failed} == {0}
    found = outcome(tmp_path)
    # As many steps are running, or waiting for a worker, as there are workers.
    assert found["began"] >= done - SAVED_EVERY - 5
    assert found["began"] % SAVED_EVERY == 0
    assert 0 <= found["steps"] - 2 * STEPS <= 1
    assert found["evaluate"][1] > 0.95


def test_another_number_of_servers(tmp_path: Path) -> None:
    """A table split over two parameter servers is resumed on three, and by a single process.

    Its values and those of the optimizer are the same.
    """
    rows = {2: [500, 500], 3: [334, 333, 333]}
    found = []
    for epochs, servers in ((1, 2), (2, 3)):
        command = [str(SPLIT), str(tmp_path), str(epochs)]
        with Job(tmp_path, command, 1, {}, servers) as running:
            assert running.wait("chief", 0, LIMIT_S) == 0, running.output_ends()
        found.append(outcome(tmp_path))
        assert [size for size, _ in found[-1]["parts"]] == rows[servers]
        assert {server for _, server in found[-1]["parts"]} == set(range(servers))
    [alone] = run_workers([str(SPLIT), str(tmp_path), "3"], 1, timeout_s=LIMIT_S)
    assert alone.returncode == 0, alone.output
    found.append(outcome(tmp_path))
    assert len(found[-1]["parts"]) == 1
    assert [each["steps"] for each in found] == [20, 40, 60]
    for before, now in itertools.pairwise(found):
        assert set(now["begun"]) == {"embeddings", "momentum", "velocity"}
        assert (now["began"], now["begun"]) == (before["steps"], before["ended"])
    assert found[-1]["loss"] < found[0]["loss"]
