"""Signals to the supervisor, as a file that an event loop can wait for."""

from __future__ import annotations

import signal
import socket
from types import FrameType
from typing import Any, Self

from keras_distplug.core.operating_system import signals

# `sbatch --signal=USR1@120` sends the signal to all processes of the step.
STOPPING = signals("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")


class Interruptions:
    """Collects the signals that stop the supervisor. A context manager for the main thread.

    The interpreter writes the number of every signal to a socket as soon as it arrives, so signals
    are neither lost while the loop is busy, nor do they interrupt it.
    """

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        self._handlers: dict[signal.Signals, Any] = {}
        self._wakeup_fd = -1

    def fileno(self) -> int:
        """Returns a file descriptor that is readable after a signal."""
        return self._receiver.fileno()

    def received(self) -> list[signal.Signals]:
        """Returns the signals since the last call, in order. Never blocks."""
        try:
            numbers = self._receiver.recv(4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in numbers if number in STOPPING]

    def __enter__(self) -> Self:
        self._wakeup_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for number in STOPPING:
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # started with nohup
            self._handlers[number] = signal.signal(number, _only_wake)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_fd)
        self._receiver.close()
        self._sender.close()


def _only_wake(number: int, frame: FrameType | None) -> None:
    """Does nothing: the number is already in the wake-up socket."""
