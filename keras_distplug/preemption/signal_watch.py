"""Signals to a worker, noticed at once.

Python runs its handlers in the main thread only, which may be blocked in a collective for minutes.
The number of a signal also goes into a file descriptor the moment it comes, for a thread to read.

MultiWorkerMirroredStrategy handles SIGTERM itself, in C++, from when it is made, so that whoever
wants to hear of it has to come later.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

_AGAIN_S = 0.5


class SignalWatch:
    """Hears of signals, until it is removed or what it is for is over.

    Args:
        numbers: Of which signals. One that is ignored in this process stays so.
        on_signal: Called from a thread, once for each that comes.
        is_wanted: Called with the frame that the main thread is in. Once it is false, a signal is
            for who was there before.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        on_signal: Callable[[int], None],
        is_wanted: Callable[[FrameType | None], bool],
    ) -> None:
        self._numbers = frozenset(numbers)
        self._on_signal = on_signal
        self._is_wanted = is_wanted
        self._before: dict[int, Any] = {}
        self._is_removed = self._stands_aside = False

    def install(self) -> None:
        """In the main thread only. Removes the watches whose purpose is over.

        Raises:
            ValueError: In another thread.
        """
        for other in list(_installed):
            if not other._is_wanted(sys._getframe()):
                other.remove()
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._fd_before = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for number in self._numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        _installed.append(self)
        _look_after_forks()
        threading.Thread(target=self._read, name="keras_distplug-signals", daemon=True).start()

    def remove(self) -> None:
        """In the main thread only. A handler that came later stays, and reaches through to the one
        from before."""
        if self._is_removed:
            return
        self._is_removed = True
        _installed.remove(self)
        for number in self._before:
            if signal.getsignal(number) == self._handle:
                signal.signal(number, self.handler_before(number))
        now = signal.set_wakeup_fd(-1)
        with contextlib.suppress(ValueError, OSError):  # what was there may be closed by now
            signal.set_wakeup_fd(self._fd_before if now == self._sender.fileno() else now)
        self._sender.close()  # ends the thread: it reads the end of the stream

    def hand_over(self, number: int) -> None:
        """Gives a signal to who was there before, in the main thread, whatever that waits for. From
        another thread."""
        self._stands_aside = True
        main = threading.main_thread().ident or 0
        is_ours = True
        while is_ours:
            # A real signal, which also ends a wait for a lock, unless it comes just before that.
            if hasattr(signal, "pthread_kill"):
                signal.pthread_kill(main, number)
            else:  # Windows, where a signal of any thread reaches the main one
                signal.raise_signal(number)
            time.sleep(_AGAIN_S)
            is_ours = not self._is_removed and signal.getsignal(number) == self._handle

    def handler_before(self, number: int) -> Any:
        """As `signal.signal` takes it. One that was not Python's, TensorFlow's, is the default."""
        before = self._before.get(number)
        return signal.SIG_DFL if before is None else before

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_removed and not self._stands_aside and self._is_wanted(frame):
            return  # the thread has it
        self.remove()
        before = self.handler_before(number)
        if callable(before):
            before(number, frame)
        elif before is signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _read(self) -> None:
        main = threading.main_thread().ident
        with self._receiver:
            while numbers := self._receiver.recv(64):
                for number in numbers:
                    self._act(number, sys._current_frames().get(main or 0))

    def _act(self, number: int, frame: FrameType | None) -> None:
        is_ours = number in self._before and not self._stands_aside
        if not is_ours or not self._is_wanted(frame):
            self._pass_on(number)
            return
        try:
            self._on_signal(number)
        except Exception as error:  # noqa: BLE001 (the next signal must be heard, too)
            warnings.warn(f"Signal {number} had no effect: {error!r}", stacklevel=1)

    def _pass_on(self, number: int) -> None:
        if self._fd_before != -1:
            with contextlib.suppress(OSError):  # its owner may have closed it
                os.write(self._fd_before, bytes([number]))


_installed: list[SignalWatch] = []
_masks = threading.local()


@functools.cache
def _look_after_forks() -> None:
    """A child has the handlers and the socket of its parent, which would take a signal to the child
    for one to itself, while the child would survive it."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=_block, after_in_parent=_unblock, after_in_child=_forget_what_is_the_parents
        )


def _block() -> None:
    numbers = {number for watch in _installed for number in watch._before}
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _forget_what_is_the_parents() -> None:
    for watch in reversed(list(_installed)):
        # The thread that has forked is the main one of the child.
        watch.remove()
        watch._receiver.close()
    _unblock()
