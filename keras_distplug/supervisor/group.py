"""A group of worker processes: start them, wait for what happens to them, signal them.

Each worker is a session of its own, so that whatever its command has started belongs to it and ends
with it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from keras_distplug.supervisor.launch import spawn
from keras_distplug.supervisor.output import Output, pump
from keras_distplug.supervisor.signals import Interruptions

_LEFTOVER_POLL_SECS = 0.05
_REAP_SECS = 5.0


class Watch(Protocol):
    """Is told which process groups live, to end them if the supervisor cannot."""

    def started(self, group: int) -> None: ...

    def ended(self, group: int) -> None: ...


@dataclass(frozen=True)
class Ended:
    """A worker's process has ended.

    Args:
        worker: Its name.
        returncode: As `subprocess` gives it: negative for a death by signal.
        at: `time.time()` when it was noticed.
    """

    worker: str
    returncode: int
    at: float


@dataclass(frozen=True)
class Happened:
    """What `Group.wait` woke up for; both empty when the time was over."""

    ended: tuple[Ended, ...] = ()
    signals: tuple[signal.Signals, ...] = ()


@dataclass(frozen=True)
class _Process:
    worker: str
    handle: subprocess.Popen[bytes]
    pidfd: int
    reader: threading.Thread


class Group:
    """Worker processes that run. A context manager: nobody is left when it is closed.

    Args:
        output: Shows what the workers print.
        watch: Learns which process groups live.
        interruptions: Signals to the supervisor, reported by `wait`.
    """

    def __init__(self, output: Output, watch: Watch, interruptions: Interruptions) -> None:
        self._output = output
        self._watch = watch
        self._interruptions = interruptions
        self._selector = selectors.DefaultSelector()
        self._selector.register(interruptions, selectors.EVENT_READ)
        self._running: dict[str, _Process] = {}
        self._leaving: dict[str, _Process] = {}  # the command is dead, what it started is not
        self._readers: list[threading.Thread] = []

    @property
    def alive(self) -> bool:
        """True while a worker, or something that it started, has not ended."""
        return bool(self._running or self._leaving)

    def start(self, worker: str, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Starts one worker."""
        handle = spawn(command, environ)
        self._watch.started(handle.pid)
        assert handle.stdout is not None
        reader = threading.Thread(
            target=pump,
            args=(handle.stdout, worker, self._output),
            name=f"output of {worker}",
            daemon=True,  # something in a session of its own may keep the pipe open for ever
        )
        reader.start()
        process = _Process(worker, handle, os.pidfd_open(handle.pid), reader)
        self._selector.register(process.pidfd, selectors.EVENT_READ, process)
        self._running[worker] = process
        self._readers.append(reader)

    def wait(self, timeout_secs: float | None, spare_leftovers: bool = False) -> Happened:
        """Waits until a worker ends, a signal comes, or the time is over.

        Args:
            timeout_secs: None waits without limit.
            spare_leftovers: What outlives a worker's command is killed, unless this is True: then
                the worker counts as running until its whole process group has ended. (A shell
                dies of SIGTERM at once, while the training it started may still be saving.)
        """
        if self._leaving:
            limit = _LEFTOVER_POLL_SECS
            timeout_secs = limit if timeout_secs is None else min(limit, timeout_secs)
        signals: tuple[signal.Signals, ...] = ()
        for key, _ in self._selector.select(timeout_secs):
            if isinstance(key.data, _Process):
                self._leave(key.data)
            else:
                signals = tuple(self._interruptions.received())
        gone = [
            process
            for process in self._leaving.values()
            if not (spare_leftovers and _has_living_members(process.handle.pid))
        ]
        now = time.time()  # one for all: nobody knows in which order they ended
        return Happened(tuple(self._reap(process, now) for process in gone), signals)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to every worker and whatever it started."""
        for process in (*self._running.values(), *self._leaving.values()):
            # The leader is not reaped yet, so the number cannot belong to anybody else.
            os.killpg(process.handle.pid, number)

    def drain(self, timeout_secs: float) -> None:
        """Waits until everything that ended workers have printed is shown."""
        deadline = time.monotonic() + timeout_secs
        running = {process.reader for process in self._running.values()}
        for reader in self._readers:
            if reader not in running:
                reader.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.signal(signal.SIGKILL)
        for process in list(self._running.values()):
            self._leave(process)
        for process in list(self._leaving.values()):
            # Whoever hangs in the kernel keeps an error under way, which says so.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._reap(process, time.time())
        self.drain(1.0)
        self._selector.close()

    def _leave(self, process: _Process) -> None:
        self._selector.unregister(process.pidfd)
        os.close(process.pidfd)
        self._leaving[process.worker] = self._running.pop(process.worker)

    def _reap(self, process: _Process, now: float) -> Ended:
        del self._leaving[process.worker]
        os.killpg(process.handle.pid, signal.SIGKILL)
        self._watch.ended(process.handle.pid)
        return Ended(process.worker, process.handle.wait(_REAP_SECS), now)


def _has_living_members(group: int) -> bool:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended since the folder was listed
        state, group_of_process = fields[0], int(fields[2])
        if group_of_process == group and state not in "ZX":
            return True
    return False
