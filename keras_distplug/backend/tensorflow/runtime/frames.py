"""Callers, and their local variables.

Python 3.11 and 3.12 keep what `f_locals` has given until somebody asks again, and with it what the
function itself has let go. From 3.13 on (PEP 667) nothing is kept.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

# How the names of files begin whose code is no user's.
NOT_THE_USERS = (
    str(Path(__file__).parents[3]),  # this package
    *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")},
)


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """`frame`, and those that have called it, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def local(frame: FrameType, name: str) -> Any:
    """A variable of a function that runs in this thread; None if it has none of this name."""
    code = frame.f_code
    if name not in code.co_varnames and name not in code.co_cellvars:
        return None
    found = frame.f_locals
    value = found.get(name)
    if isinstance(found, dict):
        found.clear()
    return value
