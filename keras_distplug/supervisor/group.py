"""The processes of a job: start the workers, wait for what happens to them, signal them all."""

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
_LOOK_SECS = 1.0  # the kernel sends no signal for a new orphan
_DRAIN_SECS = 1.0  # used up only if somebody else holds a pipe, or nobody reads our output
_KILL_SECS = 30.0  # a killed process that lives on hangs in the kernel, e.g. on a dead network disk


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
class _Process:
    worker: str
    handle: Handle
    pidfd: int


class Group:
    """The workers of one attempt, and whatever they start.

    A context manager: nobody is left when it is closed.

    Args:
        output: Shows what the workers print.
        interruptions: Signals to the supervisor, reported by `wait`.
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
        """True while the command of one of these, by default of any, has not ended."""
        return any(worker in self._running for worker in self._named(workers))

    def lives(self, workers: Collection[str] | None = None) -> bool:
        """True while one of these, by default of all, or something that it started, has not
        ended."""
        marks = self._marks_of(workers)
        return self.runs(workers) or guard.living(marks, adopted=workers is None)

    def add(self, worker: str, started: Started) -> None:
        """Takes care of a worker that has been started. Nothing may live of one that had its
        name."""
        handle = started.handle
        self._marks[worker] = started.mark
        process = _Process(worker, handle, os.pidfd_open(handle.pid))
        self._selector.register(process.pidfd, selectors.EVENT_READ, process)
        self._running[worker] = process
        reader = threading.Thread(
            target=pump,
            args=(handle.stdout, worker, self._output),
            name=f"output of {worker}",
            daemon=True,  # something that is not of the job may keep the pipe open for ever
        )
        reader.start()
        self._readers[worker] = reader

    def wait(self, timeout_secs: float) -> tuple[list[Ended], list[signal.Signals]]:
        """Waits until a worker's command ends, a signal comes, or the time is over. Returns the
        ends and the signals."""
        if not self._running:
            timeout_secs = min(_POLL_SECS, timeout_secs)
        signals: list[signal.Signals] = []
        gone: list[_Process] = []
        deadline = time.monotonic() + timeout_secs
        while True:
            left_secs = max(0.0, deadline - time.monotonic())
            for key, _ in self._selector.select(min(left_secs, _LOOK_SECS)):
                if isinstance(key.data, _Process):
                    gone.append(key.data)
                else:
                    signals = self._interruptions.received()
            guard.reap_orphans()
            if gone or signals or left_secs <= _LOOK_SECS:
                break
        now = time.time()  # one for all: nobody knows in which order they ended
        return [self._reap(process, now) for process in gone], signals

    def signal(self, number: signal.Signals, workers: Collection[str] | None = None) -> None:
        """Sends a signal to these workers, by default to all, and to whatever they started."""
        guard.signal_all(self._marks_of(workers), number, adopted=workers is None)

    def kill(self, workers: Collection[str] | None = None) -> list[Ended]:
        """Kills these workers, by default all, and whatever they started, and waits until they are
        dead.

        Returns:
            The ends of workers meanwhile, of others too.

        Raises:
            SupervisorError: If one of them does not die.
        """
        ended: list[Ended] = []
        deadline = time.monotonic() + _KILL_SECS
        while self.lives(workers):
            # Each time: what was being started was not seen before.
            self.signal(signal.SIGKILL, workers)
            ended += self.wait(_POLL_SECS)[0]
            if time.monotonic() > deadline:
                raise SupervisorError(
                    f"A worker has not ended {_KILL_SECS:g} s after SIGKILL. It probably waits for "
                    "a disk or a network mount that does not answer: see its state in `ps -o pid,"
                    "stat,wchan`, and start again once it is gone."
                )
        return ended

    def drain(self) -> None:
        """Waits until everything that ended workers have printed is shown."""
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

    def _named(self, workers: Collection[str] | None) -> Collection[str]:
        return self._marks if workers is None else workers

    def _marks_of(self, workers: Collection[str] | None) -> set[str]:
        return {self._marks[worker] for worker in self._named(workers)}

    def _reap(self, process: _Process, now: float) -> Ended:
        self._selector.unregister(process.pidfd)
        os.close(process.pidfd)
        del self._running[process.worker]
        ended = Ended(process.worker, process.handle.wait(), now)
        guard.forget_child(process.handle.pid)
        return ended
