"""The supervisor as the first process of a container, which receives the kubelet's signals."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from supervision import Supervision, await_until

pytestmark = pytest.mark.timeout(120)

UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

# A worker that leaves an exiting orphan behind and handles a signal.
LEAVING = """
train()
orphan = "import subprocess; subprocess.Popen(['true'], start_new_session=True)"
subprocess.run([sys.executable, "-c", orphan], check=True)
def leave(*_):
    mark("signaled")
    complete()
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
mark(os.getppid())
sleep()
"""


def children(pid: int) -> list[tuple[int, str]]:
    """Returns the children's PIDs and states."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            before, _, after = path.read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, parent = after.split()[:2]
        if int(parent) == pid:
            found.append((int(before.split()[0]), state))
    return found


def test_first_process(start: Callable[..., Supervision]) -> None:
    """SIGTERM reaches the worker, and every exited process is reaped, whatever its parent was."""
    if (
        shutil.which("unshare") is None
        or subprocess.run([*UNSHARE, "true"], check=False).returncode
    ):
        pytest.skip("no permission to create a PID namespace")
    job = start(LEAVING, workers=1, prefix=UNSHARE)
    await_until(lambda: bool(job.marks()), "the worker trains")
    assert job.marks() == ["1"]  # the supervisor's PID there
    [(supervisor, _)] = children(job.process.pid)
    await_until(
        lambda: all(state != "Z" for _, state in children(supervisor)), "the orphan is reaped"
    )
    subprocess.run(["kill", f"-{signal.SIGTERM:d}", str(supervisor)], check=True)
    code, printed = job.finish()
    assert job.marks() == ["1", "signaled"], printed
    assert code == 143, printed
