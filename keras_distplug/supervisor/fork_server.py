"""Starts workers from a fork server, and as ordinary processes where that cannot be."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from keras_distplug.core.supervised import FORK_SERVER, Supervised
from keras_distplug.supervisor import forking, guard
from keras_distplug.supervisor.launch import MEMBER, Started, spawn

_NO_ATTEMPT = -1
# This package first: of what is registered for the end of a process, the first runs last.
MODULES = ("keras_distplug", "tensorflow", "keras")
_REPLY_SECS = 10.0  # a fork takes a tenth of a second
_LAST_OUTPUT = 300  # characters of what a server has printed last
_KILL_SECS = 5.0
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_OPTION = re.compile(r"-[bBdEIOPqRsSuv]+|-[WX].*|--check-hash-based-pycs")


@dataclass(frozen=True)
class PythonCommand:
    """A command that runs Python.

    Args:
        interpreter: With its options.
        arguments: From the script on, or from `-m` or `-c` on.
    """

    interpreter: tuple[str, ...]
    arguments: tuple[str, ...]

    @classmethod
    def of(cls, command: Sequence[str]) -> Self | None:
        """None if it is another program, or nothing that a fork could run."""
        if not re.fullmatch(r"python(3(\.\d+)?)?", Path(command[0]).name):
            return None
        at = 1
        while at < len(command) and _OPTION.fullmatch(command[at]):
            at += 2 if command[at] in _WITH_VALUE else 1
        arguments = tuple(command[at:])
        if not arguments or (arguments[0] in ("-m", "-c") and len(arguments) < 2):
            return None
        if arguments[0] not in ("-m", "-c") and Path(arguments[0]).suffix != ".py":
            return None  # another option, a folder or an archive
        return cls(tuple(command[:at]), arguments)


class ServerError(Exception):
    """The fork server has ended, hangs, or cannot fork."""


class Server:
    """A process that has imported TensorFlow and Keras, and forks others.

    Args:
        interpreter: With its options.
        environ: Its environment, which holds the marks of `forking.MARKS`.
        modules: What it imports.
        shown: More of its command line, which `ps` shows of whatever it forks.

    Raises:
        OSError: If it cannot be started.
    """

    def __init__(
        self,
        interpreter: Sequence[str],
        environ: Mapping[str, str],
        modules: Sequence[str] = MODULES,
        shown: Sequence[str] = (),
    ) -> None:
        guard.become_subreaper()
        self._marks = [f"{MEMBER}={environ[MEMBER]}"]
        self._connection, theirs = socket.socketpair()
        self.is_ready = False
        # A pipe that nobody reads would fill up.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        with theirs:
            command = [forking.__file__, str(theirs.fileno()), ",".join(modules), *shown]
            self._process = subprocess.Popen(
                [*interpreter, *command],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        guard.note_child(self._process.pid)

    def look(self) -> None:
        """Takes note of what it has said: that it is ready.

        Raises:
            ServerError: If it has ended.
        """
        while select.select([self._connection], [], [], 0)[0]:
            self._receive()
            self.is_ready = True

    def fork(self, request: forking.Request, descriptors: Sequence[int]) -> int:
        """Forks a process, which becomes a child of this one, and returns its number.

        Args:
            request: What it runs.
            descriptors: Its standard input, output and errors.

        Raises:
            ServerError: If there is no such process.
        """
        try:
            self._connection.settimeout(_REPLY_SECS)
            forking.send(self._connection, vars(request), descriptors)
        except OSError as error:
            raise ServerError(f"it cannot be reached: {error}") from error
        pid = int(self._receive()["pid"])
        guard.note_child(pid)
        if not _is_our_child(pid):
            os.kill(pid, signal.SIGKILL)
            raise ServerError("this system does not hand over the processes that it forks")
        return pid

    def _receive(self) -> Mapping[str, Any]:
        self._connection.settimeout(_REPLY_SECS)
        try:
            message, _ = forking.receive(self._connection)
        except TimeoutError as error:
            raise ServerError(f"it has not answered for {_REPLY_SECS:g} s") from error
        except (EOFError, OSError, ValueError) as error:
            raise ServerError("it has ended") from error
        if "error" in message:
            raise ServerError(message["error"])
        return dict(message)

    def close(self) -> str:
        """Ends it, and returns the last that it has printed."""
        self._connection.close()
        guard.signal_all(self._marks, signal.SIGKILL)  # also what it was just forking
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_SECS)
        guard.reap_orphans()
        with self._output as file:
            file.seek(0)
            return file.read().decode(errors="replace").strip()[-_LAST_OUTPUT:]


class ForkServer:
    """Starts workers, by a fork where that is possible. A context manager: ends its server.

    The server is started by `prepare`, and ready some seconds later. Until then, after it has
    failed, and where forking would not be safe, workers are ordinary processes.

    Args:
        command: What every worker runs.
        environ: What a worker's environment is made from.
        job: The job's name.
        folder: Where workers write why they had to start over.
        is_on: Whether the user wants one.
        why_not: Why there cannot be one; empty if there can.
        modules: What the server imports.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        job: str,
        folder: Path,
        *,
        is_on: bool = True,
        why_not: str = "",
        modules: Sequence[str] = MODULES,
    ) -> None:
        self._command = command
        self._python = PythonCommand.of(command)
        self._environ, self._job, self._folder = environ, job, folder
        self._modules = modules
        self._refusals = folder / "not_forked"
        self._settings: dict[str, str] = {}
        self._server: Server | None = None
        self._notes: list[str] = []
        self._is_on = is_on
        if is_on and (why_not or self._python is None):
            self.turn_off(why_not or f"{command[0]} is no Python interpreter that runs a script")

    def prepare(self, settings: Mapping[str, str] | None = None) -> None:
        """Starts the server, unless it runs. Does not wait until it is ready.

        Args:
            settings: Environment variables that a worker's script had set before it imported this
                package.
        """
        # Those of a forked worker are the same as the server's, and so not among these.
        self._settings |= forking.settings(settings or {})
        self._look()
        if not self._is_on or self._server is not None:
            return
        assert self._python is not None
        contract = Supervised(self._job, _NO_ATTEMPT, self._folder)
        environ = {**self._environ, **contract.to_env(), FORK_SERVER: json.dumps(self._settings)}
        environ[MEMBER] = uuid.uuid4().hex
        try:
            self._server = Server(
                self._python.interpreter, environ, self._modules, self._python.arguments
            )
        except OSError as error:
            self.turn_off(f"it cannot be started: {error}")

    def start(self, environ: Mapping[str, str]) -> tuple[Started, bool]:
        """Starts a worker.

        Args:
            environ: Its environment.

        Returns:
            Its process, and whether it was forked.
        """
        self._look()
        if self._server is not None and self._server.is_ready:
            name = uuid.uuid4().hex
            try:
                return self._fork(self._server, {**environ, MEMBER: name}), True
            except (ServerError, OSError) as error:
                self.turn_off(str(error))
                # It may have been forked all the same, and only the answer was late.
                guard.end_all([f"{MEMBER}={name}"], _KILL_SECS)
        return spawn(self._command, environ), False

    def notes(self) -> list[str]:
        """What there is to say since it was last asked."""
        self._look()
        notes, self._notes = self._notes, []
        return notes

    def _look(self) -> None:
        if self._server is None:
            return
        try:
            self._server.look()
        except ServerError as error:
            self.turn_off(str(error))
        if self._is_on and self._refusals.exists():
            self.turn_off(f"the script needs a process of its own: {self._refusals.read_text()}")

    def _fork(self, server: Server, environ: dict[str, str]) -> Started:
        assert self._python is not None
        arguments = self._python.arguments
        request = forking.Request(arguments, environ, os.getcwd(), str(self._refusals))
        reading, writing = os.pipe()
        output = os.fdopen(reading, "rb", buffering=0)
        try:
            with open(os.devnull, "rb") as nothing:
                pid = server.fork(request, [nothing.fileno(), writing, writing])
        except BaseException:
            output.close()
            raise
        finally:
            os.close(writing)
        started = Started(Forked(pid, output), f"{MEMBER}={environ[MEMBER]}")
        guard.note_worker(pid, started.mark)
        return started

    def turn_off(self, why: str) -> None:
        """Workers are ordinary processes from now on."""
        if not self._is_on:
            return
        self._is_on = False
        printed = self._close()
        last = f"; it has printed: {printed}" if printed else ""
        self._notes.append(f"workers start without the fork server: {why}{last}")

    def _close(self) -> str:
        server, self._server = self._server, None
        return "" if server is None else server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


class Forked:
    """A process that a fork server has started, as `subprocess.Popen` gives it.

    Args:
        pid: A child of this process.
        stdout: What it prints; None if that goes elsewhere.
    """

    def __init__(self, pid: int, stdout: IO[bytes] | None = None) -> None:
        self.pid = pid
        self.stdout = stdout
        self._returncode: int | None = None

    def wait(self) -> int:
        """Waits until it has ended, and returns its exit code, negative for a signal."""
        if self._returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self._returncode = os.waitstatus_to_exitcode(status)
        return self._returncode


def _is_our_child(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return int(status.rpartition(")")[2].split()[1]) == os.getpid()
