"""With which codes a process of training ends, besides 0, and 1 for an error.

Codes from 128 on are what Kubeflow takes as worth another try, those below not. Deaths by a signal
pass through.
"""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """Of a process that says whether to start it again."""

    DO_NOT_RESTART = 93  # it would fail in the same way each time
    INTERRUPTED = 130  # by ctrl-C: never started again
    PREEMPTED = 143  # told to go, and saved: start it again
    HUNG = 200  # did not get on, by itself or with others: start it again
    PEER_LOST = 201  # another worker is gone: start all of them again
