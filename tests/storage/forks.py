"""Real processes that run a function of a test and may die in the middle of it."""

from __future__ import annotations

import io
import itertools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection
from typing import Any


def ending(action: Callable[[], object]) -> int:
    """Runs `action` in a separate process. Returns 0, 1 for an exception, or -9 if it was
    killed."""
    return together([action])[0]


def together(actions: list[Callable[[], object]]) -> list[int]:
    """Runs all `actions` concurrently, in separate processes; returns their results as in
    `ending`."""
    gate, opener = os.pipe()

    def behind_gate(action: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            os.close(opener)
            os.read(gate, 1)  # returns once the parent has closed it
            return action()

        return run

    children = [start(behind_gate(action)) for action in actions]
    os.close(gate)
    os.close(opener)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def kill_before(number: int, *, uncounted: Collection[str] = ()) -> None:
    """Makes this process kill itself just before its `number`-th system call from now."""
    numbers = itertools.count(1)

    def count(name: str) -> None:
        if name not in uncounted and next(numbers) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    _watch(count)


def system_calls(action: Callable[[], object]) -> list[str]:
    """Returns the names of the system calls that `action` makes, such as `link` and `write`."""
    names: list[str] = []
    _watch(names.append)
    try:
        action()
    finally:
        sys.setprofile(None)
    return names


def start(action: Callable[[], object]) -> int:
    """Starts `action` in a separate process and returns the process's ID immediately."""
    if child := os.fork():
        return child
    signal.alarm(60)  # no child outlives a test by more than this
    code = 1
    try:
        action()
        code = 0
    except BaseException:  # noqa: BLE001  (the exit code reports it)
        traceback.print_exc()
    finally:
        os._exit(code)


def _watch(told: Callable[[str], object]) -> None:
    def profile(frame: object, event: str, function: Any) -> None:
        if event != "c_call" or function.__name__ in ("fspath", "_exit"):
            return
        if function.__name__.startswith("_path_"):  # Python 3.13 takes paths apart in C
            return
        of_file = isinstance(getattr(function, "__self__", None), io.IOBase)
        if of_file or getattr(function, "__module__", None) in ("posix", "_io"):
            told(function.__name__)

    sys.setprofile(profile)
