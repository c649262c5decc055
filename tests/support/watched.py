"""Processes whose output a test reads while they run."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


class Watched:
    """A process in its own session.

    Args:
        command: Command to run.
        env: Its complete environment.
        cwd: Working directory.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        self._process = subprocess.Popen(
            command,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._text = ""
        self._is_over = False
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        return self._text

    def wait_for(self, text: str, timeout_s: float) -> None:
        """Waits until it has printed `text`, which it must."""
        with self._more:
            self._more.wait_for(lambda: text in self._text or self._is_over, timeout_s)
        assert text in self._text, f"{text!r} never came:\n{self._text}"

    def await_(self, happens: Callable[[], object], timeout_s: float) -> None:
        """Waits for a condition other than its output."""
        end_s = time.monotonic() + timeout_s
        while not happens():
            assert not self._is_over, f"it has exited:\n{self._text}"
            assert time.monotonic() < end_s, f"nothing has happened:\n{self._text}"
            time.sleep(0.05)

    def code(self, timeout_s: float) -> int:
        """Returns its exit code as in a shell: 128 + n for a death by signal n."""
        code = self._process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code if code >= 0 else 128 - code

    def wait(self, timeout_s: float) -> int:
        """Waits until it exits, and returns its exit code."""
        code = self._process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code

    def kill(self) -> None:
        """Kills it with all processes of its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._add(line)
        with self._more:
            self._is_over = True
            self._more.notify_all()

    def _add(self, line: str) -> None:
        with self._more:
            self._text += line
            self._more.notify_all()


def first_to_end(processes: Sequence[Watched], timeout_s: float) -> Watched:
    """Waits for the first of them to exit."""
    with contextlib.ExitStack() as stack:
        files = {}
        for process in processes:
            file = os.pidfd_open(process.pid)
            stack.callback(os.close, file)
            files[file] = process
        ended, _, _ = select.select(list(files), [], [], timeout_s)
    if not ended:
        raise TimeoutError("\n".join(each.output for each in processes))
    return files[ended[0]]


def until(end_s: float) -> float:
    """Returns the time left until `time.monotonic()` reaches `end_s`."""
    return max(0.0, end_s - time.monotonic())
