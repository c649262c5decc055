"""Exit codes of processes that end with an error of this package, for supervisors and schedulers.

A process that has lost another worker reports that with its exit code. When the interpreter ends,
TensorFlow waits for its cluster: measured, 1 s to 51 s, or forever. So a process that ends with a
`PeerLostError` runs its `atexit` functions and exits after the last of them. A process that caught
the error ends as usual, because its exit code is not known yet, but within a time limit. Preempted
workers that leave together do not wait for each other either.

An error outside `fit` may also follow from the loss of a worker. If it does not, the other workers
are notified and end, before TensorFlow would notice, even if they have not all joined yet.

A process that a supervisor or scheduler started, and that ends with a `ConfigurationError`, would
fail the same way again. It exits in the same manner, with a code that says so. Other processes keep
Python's exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import ClassVar

from keras_distplug.cluster import roles
from keras_distplug.core.errors import (
    ClusterError,
    ConfigurationError,
    FencedError,
    PeerLostError,
)
from keras_distplug.core.exit_codes import ExitCode
from keras_distplug.core.interactive import is_interactive
from keras_distplug.core.supervised import JOB, Phase, Supervised

_LAST_WORDS_S = 30.0  # for `atexit` functions, and a save in progress
_END_S = 30.0  # for TensorFlow to shut down
_MARK = "_distplug_hook"


class _Ending:
    """The end of this process."""

    has_lost_peer = False
    code: int | None = None  # None until it is known
    callers: FrameType | None = None
    consulted: ClassVar[set[Callable[[Exception], int | None]]] = set()


def prepare() -> None:
    """Prepares the end of this process. Call it early: the first function runs last."""
    register()
    if is_started_by_others(os.environ):
        _hear_of_errors()


def consult(code_of_error: Callable[[Exception], int | None]) -> None:
    """Registers a function that returns the exit code after other errors, or None for Python's."""
    _Ending.consulted.add(code_of_error)


def is_started_by_others(environ: Mapping[str, str]) -> bool:
    """True if a supervisor or a scheduler of workers reads this process's exit code."""
    if JOB in environ:
        return True
    try:
        return bool(roles.from_environment(environ).cluster)
    except ClusterError:
        return True  # variables are set, but cannot be read


def set_exit_code(code: int) -> None:
    """Sets the exit code. Call it before a `SystemExit` with this code on all workers."""
    _Ending.code = code
    # Keeps the callers' objects alive: TensorFlow may take up to a minute to end an iterator
    # (`RootDataset` notices its cancellation late).
    _Ending.callers = sys._getframe(1)


def note_lost_peer() -> None:
    """Notes the loss of a worker. Call it before the `PeerLostError` is raised."""
    _Ending.has_lost_peer = True
    _hear_of_errors()


def is_fenced() -> None:
    """Notes the loss of the directory. Call it before a `FencedError` is raised."""
    register()
    _hear_of_errors()


@functools.cache
def register() -> None:
    """Registers the exit with the code, if there is one, as the last `atexit` function."""
    atexit.register(_leave)


def _hear_of_errors() -> None:
    before = sys.excepthook
    if hasattr(before, _MARK):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if _Ending.code is None and not is_interactive():
            _Ending.code = _code_after(error)
            if _Ending.code != ExitCode.PEER_LOST and isinstance(error, Exception):
                # Even if the code is known, the other workers must be notified.
                found = [code_of(error) for code_of in _Ending.consulted]
                _Ending.code = _Ending.code or next(filter(None, found), None)
            if _Ending.code is not None:
                timer = threading.Timer(_LAST_WORDS_S, _exit, [_Ending.code])
                timer.daemon = True
                timer.start()

    setattr(hook, _MARK, True)
    sys.excepthook = hook


def _code_after(error: BaseException) -> int | None:
    if any(isinstance(each, PeerLostError) for each in chain(error)):
        return ExitCode.PEER_LOST
    reason = _cause(error, (ConfigurationError, FencedError))
    is_ours_to_say = isinstance(reason, FencedError) or is_started_by_others(os.environ)
    if reason is None or not is_ours_to_say:
        return None
    supervised = Supervised.from_env()
    if supervised is not None:
        with contextlib.suppress(ClusterError):  # then this worker has no name
            name = roles.from_environment(os.environ).name
            supervised.report(name, Phase.REFUSED, f"{type(reason).__name__}: {reason}")
    return ExitCode.DO_NOT_RESTART


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and its causes."""
    while error is not None:
        yield error
        # Keras removes the cause of an error that passes its `fit`, but not the context.
        error = error.__cause__ or error.__context__


def _cause(
    error: BaseException | None, kinds: tuple[type[BaseException], ...]
) -> BaseException | None:
    # Not the context: a caller that caught the error may have failed at something else.
    while error is not None and not isinstance(error, kinds):
        error = error.__cause__
    return error


def _leave() -> None:
    if _Ending.code is not None:
        logging.shutdown()
        _exit(_Ending.code)
    if _Ending.has_lost_peer and hasattr(signal, "setitimer"):
        # The kernel enforces this limit even when no Python thread runs.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, _END_S)


def _exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or without a reader
            stream.flush()
    os._exit(code)
