"""Runs saves in the background of training, one at a time."""

from __future__ import annotations

import functools
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from keras_distplug.core.errors import SaveError
from keras_distplug.core.threads import call_before_threads_end

# A tenth of the CPU weight of a training thread: on idle processors this costs a save nothing, and
# on busy ones it still makes progress.
_NICENESS = 10


@dataclass(frozen=True)
class SaveResult:
    """A save that has finished, or that takes too long.

    Args:
        step: The checkpoint's step.
        seconds: Time that it has taken in the background, so far.
        error: The reason why the save failed; None if it succeeded.
    """

    step: int
    seconds: float
    error: Exception | None


class Saver:
    """Runs saves in a thread, at most one at a time.

    While one runs, the state that it writes stays in memory, so the variables that change
    meanwhile exist twice. When the process ends, it waits for the save in progress.

    Args:
        timeout_s: Time in seconds for which `wait` and the end of the process wait for a save, and
            after which a save in progress is reported as failed, again after every such period.
    """

    def __init__(self, timeout_s: float = 600.0) -> None:
        self._timeout_s = timeout_s
        self._thread: threading.Thread | None = None
        self.is_idle = True  # False while a save runs, or has a result not yet returned
        self.step = 0  # of the newest save
        self._started_s = self._reported_s = 0.0
        self._results: queue.SimpleQueue[SaveResult] = queue.SimpleQueue()
        _wait_at_exit()
        _savers.add(self)

    @property
    def is_busy(self) -> bool:
        thread = self._thread  # another thread may set it to None
        return thread is not None and thread.is_alive()

    def start(self, step: int, save: Callable[[], None]) -> None:
        """Starts a save. None may be in progress.

        Args:
            step: The checkpoint's step.
            save: Writes the checkpoint.
        """
        if self.is_busy:
            raise RuntimeError(
                f"The checkpoint of step {self.step} is still being written. Call `wait` before "
                "`start`."
            )

        self.step, self.is_idle = step, False
        self._started_s = self._reported_s = started_s = time.monotonic()

        def run() -> None:
            error: Exception | None = None
            try:
                _lower_priority()
                save()
            except Exception as raised:  # noqa: BLE001 (handed over by `finished`)
                error = raised
            self._results.put(SaveResult(step, time.monotonic() - started_s, error))

        # A daemon thread, since storage that hangs forever must not block the process forever.
        self._thread = threading.Thread(target=run, name="keras_distplug-save", daemon=True)
        self._thread.start()

    @property
    def has_news(self) -> bool:
        """True if `finished` would return a save."""
        return not self._results.empty() or (self._thread is not None and self._is_late())

    def _is_late(self) -> bool:
        return self.is_busy and time.monotonic() - self._reported_s > self._timeout_s

    def finished(self) -> list[SaveResult]:
        """Returns finished saves not returned before, and one that takes too long, if any."""
        found = [self._results.get() for _ in range(self._results.qsize())]
        if not self.is_busy:
            self._thread = None
            self.is_idle = self._results.empty()
        if self._is_late():
            self._reported_s = now_s = time.monotonic()
            seconds = now_s - self._started_s
            found.append(SaveResult(self.step, seconds, self._hangs(seconds)))
        return found

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns once no save is in progress.

        Args:
            timeout_s: Longest time to wait, in seconds. Defaults to the `timeout_s` of this object.

        Raises:
            SaveError: If the save takes longer.
        """
        if (thread := self._thread) is not None:
            thread.join(self._timeout_s if timeout_s is None else timeout_s)
            if thread.is_alive():
                raise self._hangs(time.monotonic() - self._started_s)

    def _hangs(self, seconds: float) -> SaveError:
        return SaveError(
            f"The checkpoint of step {self.step} was still being written after {seconds:.0f} s. "
            "Training cannot resume from it until it is complete. If saves usually take less "
            "time, check the storage."
        )


def _lower_priority() -> None:
    """Gives training priority on the processors: on Linux, niceness is set per thread."""
    if sys.platform == "linux":
        os.nice(_NICENESS)


_savers: weakref.WeakSet[Saver] = weakref.WeakSet()


def wait_for_all() -> None:
    """Waits for all saves of this process."""
    for saver in list(_savers):
        saver.wait()


@functools.cache
def _wait_at_exit() -> None:
    call_before_threads_end(_wait_and_report)


def _wait_and_report() -> None:
    wait_for_all()
    for saver in list(_savers):
        for saved in saver.finished():
            if saved.error is not None:
                # At this point, nothing else can report it.
                print(f"keras_distplug: a checkpoint failed: {saved.error!r}", file=sys.stderr)
