"""Substitutes for features that operating systems other than Linux lack.

Not tested on macOS or Windows: the tests simulate them by removing the names that they lack.
"""

from __future__ import annotations

import functools
import os
import platform
import signal
import time

from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.log import announce

# By default, Windows opens files in text mode, which converts line endings.
BINARY = getattr(os, "O_BINARY", 0)
_CLOCK = getattr(time, "CLOCK_BOOTTIME", None)


def signals(*names: str) -> tuple[signal.Signals, ...]:
    """Returns the signals of these names that the system has."""
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


def flags(*names: str) -> int:
    """Returns the combined `os.open` flags of these names that the system has."""
    return functools.reduce(lambda found, name: found | getattr(os, name, 0), names, BINARY)


def unsuspended_s() -> float:
    """Returns the time in seconds of a clock that also runs while the machine is suspended.

    If the system has no such clock, returns `time.monotonic()`.
    """
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


def missing() -> list[str]:
    """Returns the limitations of a single process on this system."""
    lost = {
        "a process that hangs in C code is not killed": hasattr(os, "pidfd_open"),
        "only heartbeats show that another process uses the folder": _has_boot_id(),
        "a power failure may lose the newest checkpoint": hasattr(os, "O_DIRECTORY"),
        "SIGUSR1 and SIGUSR2 do not exist": hasattr(signal, "SIGUSR1"),
    }
    return [what for what, is_there in lost.items() if not is_there]


@functools.cache
def announce_missing() -> None:
    """Logs the limitations of this system in one line, once per process, if there are any."""
    if lost := missing():
        announce(f"on {platform.system()}, some protection is missing: {'; '.join(lost)}")


def require_supervision() -> None:
    """Checks that this system can run a supervisor.

    Raises:
        ConfigurationError: If it cannot.
    """
    if not (hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal") and _has_boot_id()):
        raise ConfigurationError(
            "Expected Linux 5.3 or newer, with /proc and a Python that has os.pidfd_open, for "
            f"`keras-distplug run`. Received: {platform.platform()}. Run the script directly, in "
            "a single process, or run the command on such a machine."
        )


def _has_boot_id() -> bool:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii"):
            return True
    except OSError:
        return False
