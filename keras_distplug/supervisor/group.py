"""The worker processes of an attempt: waits for their exits, and signals and kills them."""

from __future__ import annotations

import os
import selectors
import signal
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

from keras_distplug.core.errors import SupervisorError
from keras_distplug.supervisor import guard
from keras_distplug.supervisor.launch import Handle, Started
from keras_distplug.supervisor.output import Output, pump
from keras_distplug.supervisor.signals import Interruptions

_POLL_SECS = 0.05
_ORPHAN_POLL_SECS = 1.0  # the kernel does not report new orphans
_DRAIN_SECS = 1.0  # reached only if another process holds a pipe, or our output is blocked
_KILL_SECS = 30.0  # a killed process may hang in the kernel, e.g. on a dead network disk


@dataclass(frozen=True)
class Ended:
    """The end of a worker's process.

    Args:
        worker: Name of the worker.
        returncode: Return code, as in `subprocess`: negative if a signal killed it.
        at: Time at which it was noticed, in seconds since 1970.
    """

    worker: str
    returncode: int
    at: float


@dataclass(frozen=True)
class _Process:
    worker: str
    handle: Handle
    pidfd: int


class Group:
    """The workers of an attempt, and the processes that they start.

    A context manager that kills all of them on exit.

    Args:
        output: Printer of the workers' output.
        interruptions: Signals to the supervisor, returned by `wait`.
    """

    def __init__(self, output: Output, interruptions: Interruptions) -> None:
        self._output = output
        self._interruptions = interruptions
        self._selector = selectors.DefaultSelector()
        self._selector.register(interruptions, selectors.EVENT_READ)
        self._running: dict[str, _Process] = {}
        self._marks: dict[str, str] = {}
        self._readers: dict[str, threading.Thread] = {}

    def runs(self, workers: Collection[str] | None = None) -> bool:
        """Returns True while the command of one of these workers, by default any, is running."""
        return any(worker in self._running for worker in self._selected(workers))

    def lives(self, workers: Collection[str] | None = None) -> bool:
        """Returns True while one of these workers, by default any, or a process that it started, is
        running."""
        marks = self._get_marks(workers)
        return self.runs(workers) or guard.living(marks, adopted=workers is None)

    def add(self, worker: str, started: Started) -> None:
        """Adds a started worker. No process of an earlier worker of this name may be running."""
        handle = started.handle
        self._marks[worker] = started.mark
        process = _Process(worker, handle, os.pidfd_open(handle.pid))
        self._selector.register(process.pidfd, selectors.EVENT_READ, process)
        self._running[worker] = process
        reader = threading.Thread(
            target=pump,
            args=(handle.stdout, worker, self._output),
            name=f"output of {worker}",
            daemon=True,  # a process outside the job may keep the pipe open forever
        )
        reader.start()
        self._readers[worker] = reader

    def wait(self, timeout_secs: float) -> tuple[list[Ended], list[signal.Signals]]:
        """Waits until a worker's command exits, a signal arrives, or the timeout expires.

        Returns:
            The ends of workers, and the signals.
        """
        if not self._running:
            timeout_secs = min(_POLL_SECS, timeout_secs)
        signals: list[signal.Signals] = []
        gone: list[_Process] = []
        deadline = time.monotonic() + timeout_secs
        while True:
            left_secs = max(0.0, deadline - time.monotonic())
            for key, _ in self._selector.select(min(left_secs, _ORPHAN_POLL_SECS)):
                if isinstance(key.data, _Process):
                    gone.append(key.data)
                else:
                    signals = self._interruptions.received()
            guard.reap_orphans()
            if gone or signals or left_secs <= _ORPHAN_POLL_SECS:
                break
        now = time.time()  # the same for all, because the order of their exits is unknown
        return [self._reap(process, now) for process in gone], signals

    def signal(self, number: signal.Signals, workers: Collection[str] | None = None) -> None:
        """Sends a signal to these workers, by default all, and to the processes they started."""
        guard.signal_all(self._get_marks(workers), number, adopted=workers is None)

    def kill(self, workers: Collection[str] | None = None) -> list[Ended]:
        """Kills these workers, by default all, with the processes they started, and waits for them.

        Returns:
            The ends of workers meanwhile, including others.

        Raises:
            SupervisorError: If a process cannot be killed.
        """
        ended: list[Ended] = []
        deadline = time.monotonic() + _KILL_SECS
        while self.lives(workers):
            # Repeated, because a process may have been starting during the previous signal.
            self.signal(signal.SIGKILL, workers)
            ended += self.wait(_POLL_SECS)[0]
            if time.monotonic() > deadline:
                pids = guard.find_pids(self._get_marks(workers), adopted=workers is None)
                listed = ",".join(map(str, pids))
                raise SupervisorError(
                    f"Processes of the workers are still running {_KILL_SECS:g} s after SIGKILL: "
                    f"{listed}. They are probably waiting for a disk or a network mount that does "
                    "not respond (then, their state is D). Check them with `ps -o "
                    f"pid,stat,wchan:30,args -p {listed}`, and restart the job once they are gone."
                )
        return ended

    def drain(self) -> None:
        """Waits until all output of finished workers is shown."""
        deadline = time.monotonic() + _DRAIN_SECS
        for worker, reader in self._readers.items():
            if worker not in self._running:
                reader.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if not isinstance(error, SupervisorError):
                self.kill()
                self.drain()
        finally:
            self._selector.close()

    def _selected(self, workers: Collection[str] | None) -> Collection[str]:
        return self._marks if workers is None else workers

    def _get_marks(self, workers: Collection[str] | None) -> set[str]:
        return {self._marks[worker] for worker in self._selected(workers)}

    def _reap(self, process: _Process, now: float) -> Ended:
        self._selector.unregister(process.pidfd)
        os.close(process.pidfd)
        del self._running[process.worker]
        ended = Ended(process.worker, process.handle.wait(), now)
        guard.forget_child(process.handle.pid)
        return ended
