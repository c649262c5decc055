"""The key under which TensorFlow records that a worker is about to be preempted.

TensorFlow 2.18 to 2.21: under MultiWorkerMirroredStrategy, C++ code in every task waits for SIGTERM
and then stores the task's name under this key in the coordination service.
"""

from __future__ import annotations

import re

from tensorflow.python.distribute.failure_handling import preemption_watcher

NOTICE_KEY: str = preemption_watcher._PREEMPTION_KEY


def task_name(notice: str) -> str:
    """Returns a task's short name, such as `"worker-1"` for `"/job:worker/replica:0/task:1"`."""
    found = re.fullmatch(r"/job:(\w+)(?:/replica:\d+)?/task:(\d+)", notice)
    return f"{found[1]}-{found[2]}" if found else notice
