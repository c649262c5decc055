"""Starts Python processes that end with the test, if possible from a fork server.

A fork of a process that has imported TensorFlow and Keras starts in 0.1 s instead of 4 s. Processes
on other hosts, and in tests of the start itself, are ordinary ones.
"""

from __future__ import annotations

import atexit
import functools
import os
import select
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from keras_distplug.core.supervised import FORK_SERVER
from keras_distplug.supervisor import forking
from keras_distplug.supervisor.fork_server import PythonCommand, Server

_READY_SECS = 120.0
_JOB, _MEMBER = forking.MARKS


class Forked:
    """A forked process, with the interface of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._returncode: int | None = None

    def poll(self) -> int | None:
        """Returns its exit code, negative for a signal, or None while it is running."""
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float) -> int:
        """Waits for its exit.

        Raises:
            subprocess.TimeoutExpired: If it is still running after `timeout` seconds.
        """
        if self.poll() is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                if not select.select([pidfd], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            finally:
                os.close(pidfd)
        code = self._reap(0)
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Does nothing after its exit."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _reap(self, options: int) -> int | None:
        if self._returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self._returncode = os.waitstatus_to_exitcode(status)
        return self._returncode


class Process:
    """A process in its own session. A context manager that kills the whole session on exit.

    Args:
        arguments: Arguments of Python: the script, `-m` or `-c`, and everything after it.
        environ: Environment of the process.
        cwd: Working directory; None for the current one.
        prefix: Start of the command, to run it on another host.
        output: File for its output; None for a temporary one.
        is_forked: False to start an ordinary process.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        *,
        cwd: Path | None = None,
        prefix: Sequence[str] = (),
        output: Path | None = None,
        is_forked: bool = True,
    ) -> None:
        self._is_temporary = output is None
        if output is None:
            number, name = tempfile.mkstemp(prefix="output-")
            os.close(number)
            output = Path(name)
        self._output = output
        command = [*prefix, sys.executable, *arguments]
        python = PythonCommand.of(command)
        with self._output.open("ab") as file:
            if not is_forked or python is None or len(python.interpreter) > 1:
                self._handle: Forked | subprocess.Popen[bytes] = subprocess.Popen(
                    command,
                    env=environ,
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            else:
                self._handle = _fork(python.arguments, environ, cwd, file.fileno())
        self.pid = self._handle.pid

    def poll(self) -> int | None:
        return self._handle.poll()

    def wait(self, timeout_s: float) -> int:
        """Returns its exit code.

        Raises:
            AssertionError: With its output, if it has not exited in time.
        """
        try:
            return self._handle.wait(timeout_s)
        except subprocess.TimeoutExpired:
            last = self.output()[-5000:]
            raise AssertionError(f"still running after {timeout_s:g} s:\n{last}") from None

    def output(self) -> str:
        """Returns its output."""
        return self._output.read_text(errors="replace")

    def send_signal(self, number: int) -> None:
        self._handle.send_signal(number)

    def end(self) -> None:
        if self._handle.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._handle.wait(30)
        if self._is_temporary:
            self._output.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()


def _fork(
    arguments: Sequence[str], environ: Mapping[str, str], cwd: Path | None, output: int
) -> Forked:
    settings = _settings(environ)
    server = _server(tuple(sorted(settings.items())))
    refusals = Path(tempfile.gettempdir()) / f"not_forked-{uuid.uuid4().hex}"
    request = forking.Request(
        tuple(arguments),
        {_MEMBER: uuid.uuid4().hex, **environ},
        str(cwd or Path.cwd()),
        str(refusals),
    )
    with open(os.devnull, "rb") as nothing:
        pid = server.fork(request, [nothing.fileno(), output, output])
        return Forked(pid)


def _settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings of a server that can fork a process with this environment."""
    return forking.settings(environ) | forking.start_settings(environ)


@functools.cache
def _server(settings: tuple[tuple[str, str], ...]) -> Server:
    """Returns a server for these settings; there is one per environment of the imports."""
    others = {k: v for k, v in os.environ.items() if k not in _settings(os.environ)}
    marks = {_JOB: uuid.uuid4().hex, _MEMBER: uuid.uuid4().hex, FORK_SERVER: "{}"}
    server = Server([sys.executable], {**others, **dict(settings), **marks})
    atexit.register(server.close)
    select.select([server._connection], [], [], _READY_SECS)
    server.look()
    assert server.is_ready, f"the fork server is not ready after {_READY_SECS:g} s"
    return server


def naming(path: Path) -> list[str]:
    """Returns the command lines of processes that contain a text."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = each.read_bytes()
        except OSError:
            continue  # exited
        if os.fsencode(path) in line:
            found.append(line.replace(b"\0", b" ").decode(errors="replace"))
    return found
