"""Where TensorFlow keeps that a worker is about to go.

TensorFlow 2.18 to 2.21: under MultiWorkerMirroredStrategy each task waits for SIGTERM, in C++, and
tells the coordination service under this key, with its own name as the value.
"""

from __future__ import annotations

import re

from tensorflow.python.distribute.failure_handling import preemption_watcher

NOTICE_KEY: str = preemption_watcher._PREEMPTION_KEY


def task_name(notice: str) -> str:
    """`"/job:worker/replica:0/task:1"` -> `"worker-1"`."""
    found = re.fullmatch(r"/job:(\w+)(?:/replica:\d+)?/task:(\d+)", notice)
    return f"{found[1]}-{found[2]}" if found else notice
