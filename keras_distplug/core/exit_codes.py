"""Exit codes of a training process, in addition to 0 (success) and 1 (error).

Kubeflow retries a process that exits with a code of 128 or more, and gives up below that. The exit
status of a process killed by a signal is passed on unchanged.
"""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """Exit codes that say whether to restart the process."""

    DO_NOT_RESTART = 93  # it would fail in the same way every time
    INTERRUPTED = 130  # by Ctrl-C: never restarted
    PREEMPTED = 143  # preempted after saving a checkpoint: restart it
    HUNG = 200  # no progress, alone or together with its peers: restart it
    PEER_LOST = 201  # another worker is gone: restart all workers
