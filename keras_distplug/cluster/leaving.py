"""How a process ends that an error of ours has ended, for whoever starts it again.

One that has lost another worker says so by its code. TensorFlow waits for its cluster when the
interpreter ends, which then took from 1 s to 51 s, or for ever. So a process that ends with a
`PeerLostError` goes as others do up to its `atexit` functions, and leaves behind the last of them.
One that has caught the error ends as usual, because nobody can tell its code before, but not
without a limit. Workers that leave together, told to go, do not wait for each other either.

An error that no `fit` has explained may be for a lost worker, too; and one that is not ends the
others, who hear of it before TensorFlow would notice, and before they have all joined.

One that a supervisor or a scheduler has started, and that ends with a `ConfigurationError`, would
do so each time. It leaves in the same way, with a code that says that. Others do not.
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

_LAST_WORDS_S = 30.0  # for `atexit` functions, and a save under way
_END_S = 30.0  # for TensorFlow's end
_MARK = "_distplug_hook"


class _Ending:
    """Of this process."""

    peer_is_lost = False
    code: int | None = None  # once it is known
    callers: FrameType | None = None
    consulted: ClassVar[set[Callable[[Exception], int | None]]] = set()


def prepare() -> None:
    """To be called early: of what is registered for the end, the first runs last."""
    register()
    if is_started_by_others(os.environ):
        _hear_of_errors()


def consult(code_of: Callable[[Exception], int | None]) -> None:
    """Asks `code_of` for the exit code after other errors; None keeps Python's."""
    _Ending.consulted.add(code_of)


def is_started_by_others(environ: Mapping[str, str]) -> bool:
    """Whether a supervisor, or what starts the workers of a cluster, reads this process's code."""
    if JOB in environ:
        return True
    try:
        return bool(roles.from_environment(environ).cluster)
    except ClusterError:
        return True  # somebody has set what cannot be read


def with_code(code: int) -> None:
    """To be called before a `SystemExit` with this code, which all workers leave with."""
    _Ending.code = code
    # What the callers hold stays: TensorFlow may take up to a minute to end an iterator
    # (`RootDataset` misses that it is to end, until it would next look).
    _Ending.callers = sys._getframe(1)


def peer_is_lost() -> None:
    """To be called before the `PeerLostError` is raised."""
    _Ending.peer_is_lost = True
    _hear_of_errors()


def is_fenced() -> None:
    """To be called before a `FencedError` is raised."""
    register()
    _hear_of_errors()


@functools.cache
def register() -> None:
    """Has this process leave by its code at its very end, if it has one; done once."""
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
        with contextlib.suppress(ClusterError):  # then nobody knows who this is
            name = roles.from_environment(os.environ).name
            supervised.report(name, Phase.REFUSED, f"{type(reason).__name__}: {reason}")
    return ExitCode.DO_NOT_RESTART


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it came from."""
    while error is not None:
        yield error
        # Keras takes the cause from an error that passes its `fit`, and leaves the context.
        error = error.__cause__ or error.__context__


def _cause(
    error: BaseException | None, kinds: tuple[type[BaseException], ...]
) -> BaseException | None:
    # Not by way of the context: a caller that has caught the error may have failed at something
    # else.
    while error is not None and not isinstance(error, kinds):
        error = error.__cause__
    return error


def _leave() -> None:
    if _Ending.code is not None:
        logging.shutdown()
        _exit(_Ending.code)
    if _Ending.peer_is_lost and hasattr(signal, "setitimer"):
        # The kernel keeps this limit when no thread of Python runs any more.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, _END_S)


def _exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
    os._exit(code)
