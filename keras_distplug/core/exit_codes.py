"""With which codes a process of training ends, besides 0, and 1 for an error.

Codes from 128 on are what Kubeflow takes as worth another try. Deaths by a signal pass through.
"""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """Of a process that does not end by a fault of its own."""

    INTERRUPTED = 130  # by ctrl-C: never started again
    PREEMPTED = 143  # told to go, and saved: start it again
    HUNG = 200  # did not get on, by itself or with others: start it again
    PEER_LOST = 201  # another worker is gone: start all of them again
