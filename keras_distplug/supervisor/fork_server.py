"""Starts workers from a fork server, or as ordinary processes if that is not possible."""

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
# This package first: of the functions registered for the process exit, the first is called last.
MODULES = ("keras_distplug", "tensorflow", "keras")
_REPLY_SECS = 10.0  # a fork takes a tenth of a second
_LAST_OUTPUT = 300  # characters of a server's output to report
_KILL_SECS = 5.0
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_OPTION = re.compile(r"-[bBdEIOPqRsSuv]+|-[WX].*|--check-hash-based-pycs")


@dataclass(frozen=True)
class PythonCommand:
    """A command that runs Python.

    Args:
        interpreter: The interpreter and its options.
        arguments: The script, `-m` or `-c`, and everything after it.
    """

    interpreter: tuple[str, ...]
    arguments: tuple[str, ...]

    @classmethod
    def of(cls, command: Sequence[str]) -> Self | None:
        """Parses `command`. Returns None for other programs, and for what a fork cannot run."""
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
    """The fork server has exited, hangs, or cannot fork."""


class Server:
    """A process that has imported TensorFlow and Keras, and forks workers.

    Args:
        interpreter: The interpreter and its options.
        environ: Environment of the server, including the variables of `forking.MARKS`.
        modules: Modules to import. Defaults to `MODULES`.
        shown: Additional command-line arguments, which `ps` shows for the forked workers. Defaults
            to none.

    Raises:
        OSError: If the server cannot be started.
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
        # Not a pipe, which would fill up without a reader.
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
        """Reads pending messages, which say that the server is ready.

        Raises:
            ServerError: If it has exited.
        """
        while select.select([self._connection], [], [], 0)[0]:
            self._receive()
            self.is_ready = True

    def fork(self, request: forking.Request, descriptors: Sequence[int]) -> int:
        """Forks a process, which becomes a child of this one, and returns its PID.

        Args:
            request: Command and environment of the process.
            descriptors: Its standard input, output and error.

        Raises:
            ServerError: If the process could not be forked.
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
            raise ServerError(
                "on this system, the processes it forks do not become children of the supervisor"
            )
        return pid

    def _receive(self) -> Mapping[str, Any]:
        self._connection.settimeout(_REPLY_SECS)
        try:
            message, _ = forking.receive(self._connection)
        except TimeoutError as error:
            raise ServerError(f"it has not answered for {_REPLY_SECS:g} s") from error
        except (EOFError, OSError, ValueError) as error:
            raise ServerError("it has exited") from error
        if "error" in message:
            raise ServerError(message["error"])
        return dict(message)

    def close(self) -> str:
        """Stops the server. Returns the end of its output."""
        self._connection.close()
        guard.signal_all(self._marks, signal.SIGKILL)  # including an unfinished fork
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_SECS)
        guard.reap_orphans()
        with self._output as file:
            file.seek(0)
            return file.read().decode(errors="replace").strip()[-_LAST_OUTPUT:]


class ForkServer:
    """Starts workers, by forking if possible. A context manager that stops its server on exit.

    `prepare` starts the server, which is ready some seconds later. Until then, after a failure, and
    if forking is not safe, workers are started as ordinary processes.

    Args:
        command: Command of every worker.
        environ: Common part of the workers' environments.
        job: Name of the job.
        folder: Folder in which workers record why they started over.
        is_on: False if the user has disabled the fork server. Defaults to True.
        why_not: Reason why forking is not possible. Defaults to none.
        modules: Modules that the server imports. Defaults to `MODULES`.
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
            self.turn_off(why_not or f"{command[0]} is not a Python interpreter that runs a script")

    def prepare(self, settings: Mapping[str, str] | None = None) -> None:
        """Starts the server unless it is running. Does not wait until it is ready.

        Args:
            settings: Environment variables that a worker's script set before it imported this
                package. Defaults to none.
        """
        # Forked workers report none, because theirs are the same as the server's.
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
            environ: Environment of the worker.

        Returns:
            The process, and True if it was forked.
        """
        self._look()
        if self._server is not None and self._server.is_ready:
            name = uuid.uuid4().hex
            try:
                return self._fork(self._server, {**environ, MEMBER: name}), True
            except (ServerError, OSError) as error:
                self.turn_off(str(error))
                # The fork may have succeeded, and only the answer was late.
                guard.kill_all([f"{MEMBER}={name}"], _KILL_SECS)
        return spawn(self._command, environ), False

    def notes(self) -> list[str]:
        """Returns the messages since the last call."""
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
            self.turn_off(f"the script needs its own process: {self._refusals.read_text()}")

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
        """Stops the server; from now on, workers are ordinary processes."""
        if not self._is_on:
            return
        self._is_on = False
        printed = self._close()
        last = f"; its last output: {printed}" if printed else ""
        self._notes.append(f"workers start without the fork server: {why}{last}")

    def _close(self) -> str:
        server, self._server = self._server, None
        return "" if server is None else server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


class Forked:
    """A process forked by the server, with the interface of `subprocess.Popen`.

    Args:
        pid: PID of a child of this process.
        stdout: Pipe from its output. Defaults to None, if the output goes elsewhere.
    """

    def __init__(self, pid: int, stdout: IO[bytes] | None = None) -> None:
        self.pid = pid
        self.stdout = stdout
        self._returncode: int | None = None

    def wait(self) -> int:
        """Waits for its exit. Returns its exit code, or the negative number of a signal."""
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
