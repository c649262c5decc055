"""The example's batch script, unchanged, under a real Slurm with two nodes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import ROOT, run_workers
from support.real_slurm import Slurm, job_environment, slurm

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SBATCH = ROOT / "examples" / "slurm" / "train.sbatch"
SCRIPT = ROOT / "tests" / "workers" / "in_slurm.py"
CHECKSUM = re.compile(r"^(\S+): sha256 ([0-9a-f]{64})$", re.MULTILINE)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm")) as made:
        yield made


class Jobs:
    """A folder from which jobs are submitted.

    Args:
        nodes: Nodes of the jobs.
        folder: Working directory of the jobs.
    """

    def __init__(self, nodes: Slurm, folder: Path) -> None:
        self._nodes = nodes
        self._folder = folder
        self.submitted: list[str] = []
        (folder / "examples").mkdir()
        shutil.copy(SCRIPT, folder / "examples" / "train.py")
        (folder / "bin").mkdir()
        python = folder / "bin" / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        self.hold()

    def hold(self) -> None:
        """Slows down the steps."""
        (self._folder / "hold").touch()

    def release(self) -> None:
        (self._folder / "hold").unlink()

    def submit(self, *options: str) -> str:
        env = job_environment(self._folder / "bin") | {"RUNS": str(self._folder / "runs")}
        self.submitted.append(self._nodes.submit(SBATCH, *options, cwd=self._folder, env=env))
        return self.submitted[-1]

    def await_training(self, restarts: int = 0, run: str = "digits") -> None:
        """Waits until this start has trained a batch."""
        mark = self._folder / f"{run}-training-{restarts}"
        self._nodes.await_(mark.exists, 120, self.printed)

    def await_checkpoint(self) -> None:
        """Waits until a checkpoint is committed."""
        manifests = (self._folder / "runs").rglob
        self._nodes.await_(lambda: any(manifests("MANIFEST.json")), 120, self.printed)

    def end(self) -> None:
        for job in self.submitted:
            if self._nodes.state(job)["JobState"] not in ("COMPLETED", "CANCELLED"):
                self._nodes.ask("scancel", job)

    def printed(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self._folder.glob("*.out")))

    def workers(self) -> list[int]:
        """Returns the PIDs of the workers of all jobs in this folder."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().split(b"\0")
                is_here = entry.name.isdigit() and (entry / "cwd").readlink() == self._folder
                if is_here and b"examples/train.py" in command and b"python" in command[0]:
                    found.append(int(entry.name))
        return found


@pytest.fixture
def jobs(nodes: Slurm, tmp_path: Path) -> Iterator[Jobs]:
    found = Jobs(nodes, tmp_path)
    yield found
    found.end()


@pytest.fixture(scope="module")
def limited(nodes: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """A job without a signal before its time limit, submitted early so that its minute passes."""
    found = Jobs(nodes, tmp_path_factory.mktemp("limited"))
    found.submit("--time=1", "--signal=CONT@1")
    yield found
    found.end()


@pytest.fixture(scope="module")
def checksum(limited: Jobs, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Checksum of weights and optimizer after an uninterrupted training by two workers."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    command = [str(SCRIPT), "--directory", str(folder / "runs"), "--grace-secs", "120"]
    ended = run_workers(command, 2, cwd=folder, timeout_s=200)
    assert [each.returncode for each in ended] == [0, 0], ended[0].output
    [found] = {sha for each in ended for _, sha in CHECKSUM.findall(each.output)}
    return found


def test_canceled(nodes: Slurm, jobs: Jobs, checksum: str) -> None:
    """`scancel` ends the job permanently; one submitted later resumes its training."""
    job = jobs.submit()
    jobs.await_training()
    nodes.ask("scancel", job)
    nodes.await_state(job, "CANCELLED", 60)
    assert f"job {job} was canceled, so it is not requeued" in jobs.printed()
    assert jobs.workers() == []

    jobs.release()
    nodes.await_state(jobs.submit(), "COMPLETED")
    assert nodes.state(job)["JobState"] == "CANCELLED"
    assert CHECKSUM.findall(jobs.printed()) == [("digits", checksum)] * 2
    assert jobs.printed().count("resuming at epoch") == 1


def test_array(nodes: Slurm, jobs: Jobs, checksum: str) -> None:
    """Every task has its own run. Only the one that loses a worker is requeued."""
    array = jobs.submit("--array=0-1")
    for task in range(2):
        jobs.await_training(run=f"digits-{task}")
    first = nodes.state(f"{array}_0")["JobId"]
    [worker, *_] = [pid for pid in jobs.workers() if of_job(pid) == first]
    os.kill(worker, signal.SIGKILL)
    nodes.await_(lambda: nodes.state(f"{array}_0")["Restarts"] == "1", 60, jobs.printed)
    jobs.release()
    for task, restarts in enumerate((1, 0)):
        nodes.await_state(f"{array}_{task}", "COMPLETED", 200, restarts=restarts)
    expected = {(f"digits-{task}", checksum) for task in range(2)}
    assert set(CHECKSUM.findall(jobs.printed())) == expected, jobs.printed()


def test_time_limit(nodes: Slurm, limited: Jobs, checksum: str) -> None:
    """A job without a signal before its time limit saves in the remaining time and is requeued."""
    [job] = limited.submitted
    nodes.await_(lambda: nodes.state(job)["Restarts"] != "0", 150, limited.printed)
    limited.release()
    longer = ("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    nodes.await_(lambda: nodes.tries(*longer), 60, limited.printed)
    nodes.await_(lambda: nodes.state(job)["JobState"] == "COMPLETED", 120, limited.printed)
    assert "DUE TO TIME LIMIT" in limited.printed()
    assert "SIGTERM to worker-" in limited.printed()
    assert CHECKSUM.findall(limited.printed()) == [("digits", checksum)] * 2
    restarts = int(nodes.state(job)["Restarts"])
    assert limited.printed().count("resuming at epoch") == restarts


def test_requeued(nodes: Slurm, jobs: Jobs, checksum: str) -> None:
    """The signal before the time limit and `scontrol requeue` both requeue the job.

    The result is bit-identical to an uninterrupted training.
    """
    job = jobs.submit()
    jobs.await_training()
    # USR1 arrives two minutes before the limit, so immediately or soon.
    hours, minutes, _ = map(int, nodes.state(job)["RunTime"].split(":"))
    nodes.ask("scontrol", "update", f"JobId={job}", f"TimeLimit={60 * hours + minutes + 2}")
    nodes.await_(lambda: nodes.state(job)["Restarts"] == "1", 60, jobs.printed)
    assert re.search(
        r"SIGUSR1 to worker-\d on \S+: training ends with the checkpoint", jobs.printed()
    )

    nodes.ask("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    jobs.await_training(1)
    nodes.ask("scontrol", "requeue", job)
    nodes.await_(lambda: nodes.state(job)["Restarts"] == "2", 60, jobs.printed)

    jobs.await_training(2)
    jobs.release()
    nodes.await_state(job, "COMPLETED", 200, restarts=2)
    assert CHECKSUM.findall(jobs.printed()) == [("digits", checksum)] * 2, jobs.printed()
    assert jobs.printed().count("resuming at epoch") == 2


def test_lost_node(nodes: Slurm, jobs: Jobs, checksum: str) -> None:
    """A job that loses a node is requeued, and ends with the same bits."""
    job = jobs.submit()
    jobs.await_checkpoint()
    nodes.drop_node("n1")
    nodes.await_(lambda: nodes.state(job)["Restarts"] == "1", 120, jobs.printed)
    nodes.raise_node("n1")

    jobs.release()
    nodes.await_state(job, "COMPLETED", 200, restarts=1)
    assert CHECKSUM.findall(jobs.printed()) == [("digits", checksum)] * 2, jobs.printed()
    assert jobs.printed().count("resuming at epoch") == 1


def of_job(pid: int) -> str:
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    [job] = [each for each in environ if each.startswith(b"SLURM_JOB_ID=")]
    return job.partition(b"=")[2].decode()
