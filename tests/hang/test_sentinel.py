"""Real processes whose Python is blocked."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
from typing import Any

import pytest
from support.cluster import environment

from keras_distplug.hang.sentinel import Sentinel

pytestmark = pytest.mark.timeout(60)

SCRIPT = """
import ctypes, os, signal, sys, threading, time
from keras_distplug.hang.sentinel import Sentinel

sentinel = Sentinel("worker-1", 1.0)
over = threading.Event()

def say():
    while not over.wait(0.1):
        sentinel.say(1.0)

threading.Thread(target=say, daemon=True).start()
print(sentinel._process.pid, flush=True)
sys.stdin.readline()
{act}
"""


def run(act: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(act=act)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_locked() -> None:
    """C code holds the interpreter's lock: the stacks are printed, and the process dies by a
    signal."""
    process = run("ctypes.PyDLL(None).sleep(1000)")
    _, err = process.communicate("go\n", timeout=40)
    assert process.returncode == -signal.SIGABRT
    assert "worker-1 has not run Python for 1." in err
    assert 'File "<string>", line' in err


def test_runs() -> None:
    """While Python runs, nothing happens, however long; at the end, the sentinel ends, too."""
    process = run("time.sleep(3); over.set(); sentinel.close(); sentinel.close()")
    _, err = process.communicate("go\n", timeout=40)
    assert (process.returncode, err) == (0, "")


def test_stopped() -> None:
    """A suspended process is waited for."""
    process = run("time.sleep(0.5); print('goes on')")
    assert process.stdin is not None
    assert process.stdout is not None
    sentinel = os.pidfd_open(int(process.stdout.readline()))
    process.send_signal(signal.SIGSTOP)
    # Wait until it has checked a few times.
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(4)
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate("go\n", timeout=40)
    assert (process.returncode, out, err) == (0, "goes on\n", "")
    assert select.select([sentinel], [], [], 20)[0], "the sentinel is still there"


READING = """
import os, sys, time
from keras_distplug.hang import sentinel

reader, start = os.getpid(), time.monotonic()
watched = sentinel.Sentinel("worker-1", start)
watched.close()
if (pid := os.fork()) == 0:
    while os.getppid() == reader:
        watched.say(time.monotonic())
    os._exit(0)
ran = count = 0
while count < 100_000 or ran < start + 1:
    ran, limit_s = sentinel._read(watched._note)
    assert start <= limit_s <= ran, (start, limit_s, ran)
    count += 1
os.kill(pid, 9)
"""


def test_read_at_any_time() -> None:
    """Whenever the sentinel looks, it sees a time, and a limit that is not newer than that."""
    done = subprocess.run(
        [sys.executable, "-c", READING],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_killed() -> None:
    """The sentinel does not survive its process."""
    process = run("signal.pause()")
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    # The pipes close when all processes that hold them have ended.
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGKILL


def refuse(*_: Any) -> int:
    raise OSError(errno.ENOSYS, "Function not implemented")


@pytest.mark.parametrize(
    ("what", "name", "value"),
    [
        (os, "pidfd_open", refuse),  # Linux before 5.3, or a sandbox
        (os, "memfd_create", refuse),
        (sys, "executable", ""),  # Python embedded in another program
        (sys, "frozen", True),  # a frozen program, which would start again
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_unsupported_system(
    what: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On systems without support, there is no sentinel, and nothing else changes."""
    monkeypatch.setattr(what, name, value, raising=False)
    sentinel = Sentinel("worker-1", 3600.0)
    sentinel.say(3600.0)
    assert sentinel._process is None
    sentinel.close()


def test_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the sentinel cannot be started, there is a warning, and nothing else changes."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.warns(UserWarning, match="nowhere"):
        sentinel = Sentinel("worker-1", 3600.0)
    sentinel.say(3600.0)
    sentinel.close()
