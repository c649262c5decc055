"""Operating systems other than Linux: what they lack, and what to use instead.

Not run on macOS or Windows: tests remove the names that these systems lack.
"""

from __future__ import annotations

import functools
import os
import platform
import signal
import time

from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.log import announce

# Windows opens files as text, which changes the ends of lines, unless told otherwise.
BINARY = getattr(os, "O_BINARY", 0)


def signals(*names: str) -> tuple[signal.Signals, ...]:
    """Returns the signals of these names that the system has."""
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


def flags(*names: str) -> int:
    """Returns the flags of `os.open` of these names, as far as the system has them."""
    return functools.reduce(lambda found, name: found | getattr(os, name, 0), names, BINARY)


def unsuspended_s() -> float:
    """Returns the time of a clock that keeps running while the machine is suspended, if any."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def missing() -> list[str]:
    """Returns what a single process does without on this system."""
    lost = {
        "a process that hangs in C code is not ended": hasattr(os, "pidfd_open"),
        "only heartbeats show that another process uses the folder": _has_boot_id(),
        "a power failure may lose the newest checkpoint": hasattr(os, "O_DIRECTORY"),
        "SIGUSR1 and SIGUSR2 do not exist": hasattr(signal, "SIGUSR1"),
    }
    return [what for what, is_there in lost.items() if not is_there]


@functools.cache
def announce_missing() -> None:
    """Says once per process, in one line, what is missing on this system, if anything is."""
    if lost := missing():
        announce(f"limits on {platform.system()}: {'; '.join(lost)}")


def require_supervision() -> None:
    """Checks that this system can run a supervisor.

    Raises:
        ConfigurationError: If it cannot.
    """
    if not (hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal") and _has_boot_id()):
        raise ConfigurationError(
            "Expected Linux 5.3 or newer, with /proc and a Python that has os.pidfd_open, for "
            f"`keras-distplug run`. Received: {platform.platform()}. Start the script itself, in "
            "one process, or run the command on a Linux machine."
        )


def _has_boot_id() -> bool:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii"):
            return True
    except OSError:
        return False
