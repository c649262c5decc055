"""Threads for what may hang."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def before_threads_end(act: Callable[[], object]) -> None:
    """Has `act` called when the process ends, while threads can still be started, as the libraries
    of stores do: `atexit` itself comes behind that."""
    register = getattr(threading, "_register_atexit", atexit.register)
    register(act)


def in_daemon(action: Callable[[], T], name: str) -> Future[T]:
    """Runs `action` in a thread that does not keep the process from its end, as one of
    `concurrent.futures` does, be it that a storage hangs.

    Raises:
        RuntimeError: In a process that has begun to end.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(action())
        except BaseException as error:  # noqa: BLE001 (handed over)
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


def within(timeout_s: float, action: Callable[[], T], name: str) -> T:
    """Returns the result of `action`, which is left behind in its thread if it takes too long.

    Raises:
        TimeoutError: If it does.
    """
    done = in_daemon(action, name)
    try:
        return done.result(timeout_s)
    except TimeoutError:
        if done.done():  # the action's own error
            raise
        raise TimeoutError(f"no answer within {timeout_s:g} s") from None
