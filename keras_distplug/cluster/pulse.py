"""Sends signs of life to the supervisor while this process can run Python."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from keras_distplug.cluster import roles
from keras_distplug.core.errors import ClusterError
from keras_distplug.core.supervised import JOINED_BY, Supervised

_EVERY_SECS = 1.0


def begin() -> None:
    """Starts the signs of life in a process that a supervisor started; no effect in others."""
    contract = Supervised.from_env()
    if contract is None:
        return
    if os.environ.setdefault(JOINED_BY, str(os.getpid())) != str(os.getpid()):
        return
    try:
        name = roles.from_environment(os.environ).name
    except ClusterError:
        return  # reported where the role is needed
    contract.report_settings(_settings())

    def beat() -> None:
        over = threading.Event()
        try:
            pulse = contract.start_pulse(name)
            while not over.wait(_EVERY_SECS):
                os.utime(pulse)
        except OSError:
            with contextlib.suppress(OSError):
                contract.pulse_file(
                    name
                ).unlink()  # without the file, the supervisor expects no signs

    threading.Thread(target=beat, name="keras_distplug-pulse", daemon=True).start()


def _settings() -> dict[str, str]:
    """Returns the environment variables that have changed since this process started."""
    try:
        block = Path("/proc/self/environ").read_bytes()
    except OSError:
        return {}
    started_with = dict(entry.partition(b"=")[::2] for entry in block.split(b"\0"))
    return {
        name: value
        for name, value in os.environ.items()
        if started_with.get(os.fsencode(name)) != os.fsencode(value)
    }
