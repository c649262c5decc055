"""Processes that compete for a directory."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from keras_distplug.core.errors import InUseError
from keras_distplug.core.process import this_process
from keras_distplug.storage import ownership
from keras_distplug.storage.files import Files
from keras_distplug.storage.ownership import Timing

HERE = this_process()
PATIENT = Timing(beat_secs=0.02, stale_secs=60.0, look_secs=0.01)


def silent(line: str) -> None:
    raise AssertionError(f"waits: {line}")


def require_one_winner(files: Files, racers: int = 3) -> None:
    """Checks that exactly one of several threads, acting as processes, gets a directory."""
    start = threading.Barrier(racers)

    def race(number: int) -> ownership.Ownership | None:
        here = replace(HERE, started_utc=f"racer {number}")
        start.wait(10)
        try:
            return ownership._win(files, silent, here, PATIENT)
        except InUseError:
            return None

    with ThreadPoolExecutor(racers) as pool:
        winners = [each for each in pool.map(race, range(racers)) if each is not None]
    assert len(winners) == 1
    winners[0].require()
    winners[0].release()
