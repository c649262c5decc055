"""Detects numbers that a step draws from Python's and NumPy's global generators while it is traced.

Such a number becomes a constant of the trace: every step uses it, and a process that traces the
step again gets a different one.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from types import FrameType
from typing import Any

import numpy as np
import tensorflow as tf

from keras_distplug.backend.tensorflow.runtime.current import Current
from keras_distplug.backend.tensorflow.runtime.frames import callers

Drawn = Callable[[FrameType, str], None]

_GENERATORS = (
    (random, "random", random.random),
    (np.random, "numpy.random", np.random.random_sample),
)
_NO_DRAWS = frozenset({"seed", "getstate", "setstate", "get_state", "set_state"})
# Numbers drawn there are initial values of variables, which a checkpoint contains.
_MAKES_VARIABLES = frozenset({"build", "__init__"})
_listener: Current[Drawn] = Current()
_lock = threading.Lock()
_stock: list[tuple[Any, str, Any]] = []
_tracing = 0


@contextmanager
def watched(drawn: Drawn) -> Iterator[None]:
    """Calls `drawn` whenever this thread draws a number, with the drawing frame and the function's
    name, such as `random.random`.

    Modules stay patched while any thread is inside; replicas are traced in separate threads.
    """
    _patch()
    try:
        with _listener.at(drawn):
            yield
    finally:
        _restore()


def _patch() -> None:
    global _tracing
    with _lock:
        _tracing += 1
        if _tracing > 1:
            return
        for module, title, drawing in _GENERATORS:
            generator = drawing.__self__  # type: ignore[attr-defined]
            for name, function in list(vars(module).items()):
                if getattr(function, "__self__", None) is generator and name not in _NO_DRAWS:
                    _stock.append((module, name, function))
                    setattr(module, name, _watched_function(function, f"{title}.{name}"))


def _restore() -> None:
    global _tracing
    with _lock:
        _tracing -= 1
        if not _tracing:
            for module, name, function in _stock:
                setattr(module, name, function)
            _stock.clear()


def _watched_function(function: Callable[..., Any], title: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def watching(*args: Any, **kwargs: Any) -> Any:
        drawn, caller = _listener.now, sys._getframe(1)
        # In `tf.init_scope`, the number does not become a constant.
        if drawn and not tf.executing_eagerly() and not _makes_variables(caller):
            drawn(caller, title)
        return function(*args, **kwargs)

    return watching


def _makes_variables(frame: FrameType) -> bool:
    within = takewhile(lambda each: each.f_code.co_filename != __file__, callers(frame))
    return any(each.f_code.co_name in _MAKES_VARIABLES for each in within)
