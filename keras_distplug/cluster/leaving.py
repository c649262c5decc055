"""How a process ends that has lost another worker.

TensorFlow waits for its cluster when the interpreter ends, which then took from 1 s to 51 s, or for
ever. So a process that ends with a `PeerLostError` goes as others do up to its `atexit` functions,
and leaves behind the last of them. One that has caught the error ends as usual, because nobody can
tell its code before, but not without a limit.
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
from types import TracebackType

from keras_distplug.core.errors import PeerLostError
from keras_distplug.core.exit_codes import ExitCode
from keras_distplug.core.interactive import is_interactive

_LAST_WORDS_S = 30.0  # for `atexit` functions, and a save under way
_END_S = 30.0  # for TensorFlow's end


class _Ending:
    """Of this process."""

    peer_is_lost = False
    code: int | None = None  # once it is known


@functools.cache
def prepare() -> None:
    """To be called early: what is registered first runs last."""
    atexit.register(_leave)


@functools.cache
def peer_is_lost() -> None:
    """To be called before the `PeerLostError` is raised."""
    _Ending.peer_is_lost = True
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if _is_for_a_lost_peer(error) and not is_interactive():
            _Ending.code = ExitCode.PEER_LOST
            timer = threading.Timer(_LAST_WORDS_S, _exit, [_Ending.code])
            timer.daemon = True
            timer.start()

    sys.excepthook = hook


def _is_for_a_lost_peer(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, PeerLostError):
        error = error.__cause__ or error.__context__
    return error is not None


def _leave() -> None:
    if _Ending.code is not None:
        logging.shutdown()
        _exit(_Ending.code)
    if _Ending.peer_is_lost:
        # The kernel keeps this limit when no thread of Python runs any more.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, _END_S)


def _exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
    os._exit(code)
