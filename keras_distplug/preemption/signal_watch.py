"""Notices signals immediately.

Python runs signal handlers in the main thread only, which a collective may block for minutes.
Python also writes a signal's number to a file descriptor as soon as it arrives; a thread reads it.

`MultiWorkerMirroredStrategy` installs its own SIGTERM handler, in C++, when it is created, so this
one must be installed later.
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

_REPEAT_SECS = 0.5


class SignalWatch:
    """Watches for signals until it is removed or no longer active.

    Args:
        numbers: Signal numbers. Signals that the process ignores remain ignored.
        on_signal: Function called, from a thread, with the number of every signal received.
        is_active: Function called with the main thread's current frame. Once it returns False,
            signals go to the previous handlers.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        on_signal: Callable[[int], None],
        is_active: Callable[[FrameType | None], bool],
    ) -> None:
        self._numbers = frozenset(numbers)
        self._on_signal = on_signal
        self._is_active = is_active
        self._before: dict[int, Any] = {}
        self._is_removed = self._is_disabled = False

    def install(self) -> None:
        """Installs the handlers, and removes inactive watches. For the main thread only.

        Raises:
            ValueError: In another thread.
        """
        for other in list(_installed):
            if not other._is_active(sys._getframe()):
                other.remove()
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for number in self._numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        _installed.append(self)
        _reset_forked_children()
        threading.Thread(target=self._read, name="keras_distplug-signals", daemon=True).start()

    def remove(self) -> None:
        """Restores the previous handlers. For the main thread only.

        A handler installed later stays; if it calls this one, that calls the previous handler.
        """
        if self._is_removed:
            return
        self._is_removed = True
        _installed.remove(self)
        for number in self._before:
            if signal.getsignal(number) == self._handle:
                signal.signal(number, self.previous_handler(number))
        now = signal.set_wakeup_fd(-1)
        with contextlib.suppress(ValueError, OSError):  # the earlier descriptor may be closed
            signal.set_wakeup_fd(self._previous_fd if now == self._sender.fileno() else now)
        self._sender.close()  # the thread reads the end of the stream and finishes

    def run_previous_handler(self, number: int) -> None:
        """Runs the previous handler in the main thread, even if that is blocked.

        Called from another thread.
        """
        self._is_disabled = True
        main = threading.main_thread().ident or 0
        is_ours = True
        while is_ours:
            # A real signal also interrupts a wait for a lock, unless it arrives just before the
            # wait; therefore it is repeated.
            if hasattr(signal, "pthread_kill"):
                signal.pthread_kill(main, number)
            else:  # on Windows, a signal from any thread reaches the main thread
                signal.raise_signal(number)
            time.sleep(_REPEAT_SECS)
            is_ours = not self._is_removed and signal.getsignal(number) == self._handle

    def previous_handler(self, number: int) -> Any:
        """Returns the previous handler, as an argument for `signal.signal`.

        A handler that is not Python's, such as TensorFlow's, counts as the default.
        """
        before = self._before.get(number)
        return signal.SIG_DFL if before is None else before

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_removed and not self._is_disabled and self._is_active(frame):
            return  # the thread handles it
        self.remove()
        before = self.previous_handler(number)
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
        is_ours = number in self._before and not self._is_disabled
        if not is_ours or not self._is_active(frame):
            self._pass_on(number)
            return
        try:
            self._on_signal(number)
        except Exception as error:  # noqa: BLE001 (the thread must handle later signals, too)
            warnings.warn(
                f"PreemptionHandler could not handle {_get_name(number)}, so training may "
                f"continue without saving a checkpoint: {error!r}",
                stacklevel=1,
            )

    def _pass_on(self, number: int) -> None:
        if self._previous_fd != -1:
            with contextlib.suppress(OSError):  # its owner may have closed it
                os.write(self._previous_fd, bytes([number]))


_installed: list[SignalWatch] = []
_masks = threading.local()


@functools.cache
def _reset_forked_children() -> None:
    """Makes forked children drop the handlers and the socket they inherit.

    Otherwise, a signal to the child would act on the parent instead, and the child would survive.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_reset_child)


def _block() -> None:
    numbers = {number for watch in _installed for number in watch._before}
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _reset_child() -> None:
    for watch in reversed(list(_installed)):
        # The forking thread is the child's main thread.
        watch.remove()
        watch._receiver.close()
    _unblock()


def _get_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"
