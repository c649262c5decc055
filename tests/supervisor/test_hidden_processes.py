"""Processes that hide from `keras-distplug run`: none outlives its job or its attempt."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from supervision import Supervision, await_until, is_dead

Start = Callable[..., Supervision]

HIDING = """
def hide():
    # Returns the PIDs of processes without any mark of the job; the last one has exited.
    # Like setproctitle: a title overwrites the environment that the kernel shows.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(bytes(end - start))
    assert not Path("/proc/self/environ").read_bytes().strip(bytes(1))

    def orphan(*command):
        # Without `_exit`, this would reap the child if it has exited by then.
        code = "import os, subprocess, sys; command = sys.argv[1:]; child = subprocess.Popen("
        code += "command, env={}, start_new_session=True, stdout=subprocess.DEVNULL); "
        code += "print(child.pid, flush=True); os._exit(0)"
        done = subprocess.run(
            [sys.executable, "-c", code, *command], env={}, stdout=subprocess.PIPE, check=True
        )
        return int(done.stdout)

    child = subprocess.Popen(["sleep", "60"], env={})
    other = subprocess.Popen(["sleep", "60"], env={}, start_new_session=True)
    return [os.getpid(), child.pid, other.pid, orphan("sleep", "60"), orphan("true")]
"""


@pytest.mark.parametrize("options", [(), ("--no-fork-server",)], ids=str)
def test_hidden_processes(start: Start, options: tuple[str, ...]) -> None:
    """A worker that changed its title is stopped and restarted with no leftover processes.

    These have a cleared environment, are in another session, or are orphans.
    """
    job = start(
        f"""{HIDING}
train()
if attempt == 0:
    if index == 1:
        await_marks("fault")
        sys.exit(3)
    mark(" ".join(map(str, hide())))
    mark("fault")
    sleep()
pids = Path(__file__).with_name("marks").read_text().split()[:5]
for pid in pids:
    stat = Path(f"/proc/{{pid}}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX", pid
complete()
""",
        *options,
    )
    code, printed = job.finish()
    assert code == 0, printed
    assert "1 restart\n" in printed
    assert all(is_dead(int(pid)) for pid in job.marks()[0].split())


def test_killed_supervisor_of_hidden_processes(start: Start) -> None:
    """Hidden processes do not survive a killed supervisor either."""
    job = start(f"{HIDING}\ntrain()\nmark(' '.join(map(str, hide())))\nsleep()", workers=1)
    await_until(lambda: bool(job.marks()), "the worker hides")
    *pids, ended = map(int, job.marks()[0].split())
    assert not any(is_dead(pid) for pid in pids)
    # Reaping its exit code implies having seen the orphan before it.
    await_until(lambda: not Path(f"/proc/{ended}").exists(), "the supervisor knows the orphans")
    job.process.kill()
    await_until(lambda: all(is_dead(pid) for pid in pids), "all are dead")


@pytest.mark.parametrize("command", ["python", "bash", "setsid"])
def test_killed_supervisor(start: Start, command: str, tmp_path: Path) -> None:
    """No worker, nor any process that it started, survives a killed supervisor."""
    python = f"{sys.executable} {tmp_path / 'train.py'}"
    job = start(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); train(); mark(os.getpid()); sleep()",
        command={
            "python": (),
            "bash": ("bash", "-c", f"{python}; true"),
            "setsid": ("bash", "-c", f"setsid -w {python}; true"),
        }[command],
    )
    pids = job.pids(2)
    assert not any(is_dead(pid) for pid in pids)
    job.process.kill()
    await_until(lambda: all(is_dead(pid) for pid in pids), "all workers are dead")
    await_until(lambda: not list(tmp_path.glob("keras-distplug-*")), "its folder is deleted")


def test_hidden_trainer(start: Start, tmp_path: Path) -> None:
    """Before a restart, no process of the previous attempt is alive in any session."""
    job = start(
        """
mark(f"{attempt} {os.getpid()}")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if attempt == 0:
    train()
    await_training("worker-0", "worker-1")
    if index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    sleep()
pids = [line.split()[1] for line in open(Path(__file__).with_name("marks")) if line[0] == "0"]
for pid in pids:
    stat = Path(f"/proc/{pid}/stat")
    # In a container, orphans may never be reaped.
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX", pid
train()
complete()
""",
        command=("bash", "-c", f"setsid -w {sys.executable} {tmp_path / 'train.py'}; exit $?"),
    )
    code, printed = job.finish()
    assert code == 0, printed
    assert [mark[0] for mark in sorted(job.marks())] == ["0", "0", "1", "1"]


@pytest.mark.parametrize(
    "fault",
    ["outer", "inner", *(pytest.param(f, marks=pytest.mark.ci) for f in ("worker", "SIGTERM", ""))],
)
def test_nested(start: Start, fault: str, tmp_path: Path) -> None:
    """Under nested supervisors, no process is left behind, whichever process is killed.

    The job is restarted by the outer supervisor, or ends with the outermost one.
    """
    job = start(
        f"""
train()
mark(f"{{os.getpid()}} {{os.getppid()}}")
await_marks(" ", 2)
if {fault!r} and not Path(__file__).with_name("killed").exists():
    sleep()
complete()
""",
        workers=1,
        command=(
            *(sys.executable, "-m", "keras_distplug", "run", "--workers", "2"),
            *("--no-fork-server", "--", sys.executable, str(tmp_path / "train.py")),
        ),
    )
    await_until(lambda: len(job.marks()) >= 2, "both workers are marked")
    (first, inner), (second, _) = (map(int, mark.split()) for mark in job.marks()[:2])
    (tmp_path / "killed").touch()
    if fault == "SIGTERM":
        job.process.terminate()
    elif fault:
        os.kill({"outer": job.process.pid, "inner": inner, "worker": first}[fault], signal.SIGKILL)
    if fault == "outer":
        await_until(lambda: all(map(is_dead, (first, second, inner))), "nothing is left")
        return
    code, printed = job.finish()
    assert code == (143 if fault == "SIGTERM" else 0), printed
    assert all(map(is_dead, (first, second, inner)))
    if fault != "SIGTERM":
        inners, outers = int(fault == "worker"), int(fault == "inner")
        assert re.search(rf"2 workers completed .* {inners} restarts?\n", printed), printed
        assert re.search(rf"1 worker completed .* {outers} restarts?\n", printed), printed
