"""Constants and events shared by `recovery.py` and the scripts that it starts.

It imports no large packages, so that the first event of a process marks its start.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EPOCH_STEPS, SAVE_EVERY = 40, 20
FAULT_BATCH = 30  # of the epoch, counted from 1: between two saves
STEP_SECS = SAVE_SECS = 5

FILE = "events"


@dataclass(frozen=True)
class Event:
    """An event in a process.

    Args:
        at_s: The time, by `time.time()`.
        what: `"start"` of a process, end of a `"batch"`, or a `"fault"`, recorded before it occurs.
        attempt: The number of faults before the process started.
        worker: The index of the worker.
        step: For a batch, its number over all epochs, by its position in the data.
        iterations: For a batch, the number of updates of the optimizer.
    """

    at_s: float
    what: str
    attempt: int
    worker: int
    step: int = 0
    iterations: int = 0


def read(folder: Path) -> list[Event]:
    """Returns all events so far."""
    file = folder / FILE
    text = file.read_text() if file.exists() else ""
    whole, _, _ = text.rpartition("\n")
    return [Event(**json.loads(line)) for line in whole.splitlines()]


class Events:
    """Writes the events of this process."""

    def __init__(self, folder: Path) -> None:
        task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"index": 0})
        self.worker: int = task["index"]
        self.attempt = sum(event.what == "fault" for event in read(folder))
        self._file = os.open(folder / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.note("start")

    def note(self, what: str, **more: Any) -> None:
        event = {"at_s": time.time(), "what": what, "attempt": self.attempt, "worker": self.worker}
        os.write(
            self._file, (json.dumps(event | more) + "\n").encode()
        )  # in a single write, because workers share the file
