"""Callers and their local variables.

Python 3.11 and 3.12 keep the dictionary that `f_locals` returns until the next access, which keeps
objects alive that the function itself has released. Python 3.13 and later (PEP 667) keep nothing.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

# Prefixes of file names whose code is not the user's.
NOT_THE_USERS = (
    str(Path(__file__).parents[3]),  # this package
    *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")},
)


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields `frame` and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def local(frame: FrameType, name: str) -> Any:
    """Returns a local variable of a function running in this thread; None if it has none of this
    name."""
    code = frame.f_code
    if name not in code.co_varnames and name not in code.co_cellvars:
        return None
    found = frame.f_locals
    value = found.get(name)
    if isinstance(found, dict):
        found.clear()
    return value
