"""Threads for calls that may hang."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def call_before_threads_end(act: Callable[[], object]) -> None:
    """Registers `act` to be called when the process exits, while threads can still be started.

    Storage libraries start threads; functions registered with `atexit` run too late for that.
    """
    register = getattr(threading, "_register_atexit", atexit.register)
    register(act)


def run_in_daemon(action: Callable[[], T], name: str) -> Future[T]:
    """Runs `action` in a daemon thread, which does not delay the exit of the process.

    Threads of `concurrent.futures` do, so a hanging store would block the exit.

    Raises:
        RuntimeError: If the process is already exiting.
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
    """Returns the result of `action`, run in a daemon thread.

    Args:
        timeout_s: Seconds to wait for it. After that the thread is abandoned, not stopped.
        action: The function to call.
        name: The name of the thread.

    Raises:
        TimeoutError: If `action` takes longer than `timeout_s`.
    """
    done = run_in_daemon(action, name)
    try:
        return done.result(timeout_s)
    except TimeoutError:
        if done.done():  # the action's own error
            raise
        raise TimeoutError(f"no answer within {timeout_s:g} s") from None
