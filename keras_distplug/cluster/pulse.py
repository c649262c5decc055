"""Signs of life to the supervisor, as long as this process can run Python."""

from __future__ import annotations

import contextlib
import os
import threading

from keras_distplug.cluster import roles
from keras_distplug.core.errors import ClusterError
from keras_distplug.core.supervised import JOINED_BY, Supervised

_EVERY_SECS = 1.0


def begin() -> None:
    """In a process that a supervisor has started; without effect in others, and in subprocesses."""
    contract = Supervised.from_env()
    if contract is None:
        return
    if os.environ.setdefault(JOINED_BY, str(os.getpid())) != str(os.getpid()):
        return
    try:
        name = roles.from_environment(os.environ).name
    except ClusterError:
        return  # told by whoever needs it
    pulse = contract.pulse_of(name)

    def beat() -> None:
        over = threading.Event()
        try:
            pulse.write_text(str(os.getpid()))
            while not over.wait(_EVERY_SECS):
                os.utime(pulse)
        except OSError:
            with contextlib.suppress(OSError):
                pulse.unlink()  # who gives none is not missed

    threading.Thread(target=beat, name="keras_distplug-pulse", daemon=True).start()
