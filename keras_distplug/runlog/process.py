"""About this process."""

from __future__ import annotations

import os
import time

_IMPORTED_AT = time.time()


def started_at() -> float:
    """In seconds since 1970. Where Linux does not tell, when this module was loaded."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            # The name of the program, in brackets, may have spaces in it.
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/uptime", encoding="ascii") as file:
            up_s = float(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return _IMPORTED_AT
    # A forked process has not imported this itself.
    return time.time() - max(0.0, up_s - ticks / os.sysconf("SC_CLK_TCK"))
