"""One worker's log of one `fit`."""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from keras_distplug.backend.tensorflow.runtime import callback_list
from keras_distplug.core import events, reporting
from keras_distplug.core.event_lines import to_line
from keras_distplug.core.events import Entry, Event, ReplicaTimes, Window
from keras_distplug.core.interactive import is_interactive
from keras_distplug.core.ledger import Category, Ledger, split
from keras_distplug.core.operating_system import unsuspended_s
from keras_distplug.core.process import started_at
from keras_distplug.core.step_marker import StepMarker
from keras_distplug.core.supervised import Supervised
from keras_distplug.python_state import json_values
from keras_distplug.runlog.goodput_curves import GoodputCurves
from keras_distplug.runlog.log_files import Log
from keras_distplug.runlog.tracked_fit import TrackedFit
from keras_distplug.step.step_reports import StepReport
from keras_distplug.step.step_windows import OwnWindows

_LEAST_SECS, _MOST_SECS, _SHARE = 1.0, 30.0, 0.01  # between windows


class FitLog:
    """One worker's log of one `fit`; listens to all reports.

    Args:
        windows: The windows of this worker's steps.
        fit: The call of `fit`; None if it is not known.
    """

    def __init__(self, windows: OwnWindows, fit: callback_list.Calling | None) -> None:
        for each in reporting.listeners():
            if isinstance(each, FitLog):
                each.close_if_over()
        self._fit = fit
        self.is_training = False
        self.is_open = self.was_open = False
        self.epoch = 0
        self.step = 0  # batches since the run started
        self.windows = windows
        self.marker: StepMarker | None = None  # of the chief, under a supervisor
        self._steps = 0  # of this window
        self._is_first = True
        self._log: Log | None = None
        self._waiting: list[tuple[float, Event]] = []
        self._trains = threading.get_ident()
        self._begun_s = time.monotonic()
        begun_s = _begun_s()
        self._begun_at, self._at_s = time.time(), unsuspended_s()
        self.begins_at = self._begun_at - (time.monotonic() - begun_s)
        _hear_of_errors()
        self._others: Sequence[GoodputCurves | TrackedFit] = ()
        self._doing = Category.START_UP
        self._ledger = Ledger(begun_s, self._doing)
        self._loss: Any = None  # of the last step, as in its logs
        self._last_step_s = unsuspended_s()
        # By `time.perf_counter`, as in `windows`.
        self._step_begun_s = time.perf_counter()
        self._in_steps_s = 0.0  # not yet in the ledger
        self._window_ends_s = self._step_begun_s + _LEAST_SECS
        reporting.listen(self)

    def open(
        self,
        source: str,
        began: events.Began,
        log: Log,
        others: Sequence[GoodputCurves | TrackedFit],
    ) -> None:
        self._source, self._log, self._others = source, log, others
        for each in (log, *others):  # their threads would otherwise survive an error in `fit`
            weakref.finalize(self, each.close).atexit = False
        supervised = Supervised.from_env()
        self._job = None if supervised is None else supervised.job
        self._attempt = None if supervised is None else supervised.attempt
        self.is_open = self.was_open = True
        for at, event in [(self._now(), began), *self._waiting]:
            self._write(at, event)
        self._waiting.clear()

    # As a listener

    def on_event(self, event: Event) -> None:
        if isinstance(event, events.Restored):
            self.step = event.step
        is_last = isinstance(
            event, events.Finished | events.Preempted | events.PeerLost | events.Raised
        )
        if is_last or isinstance(event, events.RolledBack):
            self.end_window()  # with the steps so far
        now = self._now()
        if self.is_open:
            self._write(now, event)
        else:
            self._waiting.append((now, event))
        if is_last:
            self.close()
        elif isinstance(event, events.Hung) and self._log is not None:
            self._log.flush()

    def spent(self, category: Category, secs: float) -> None:
        if self._doing is Category.STEP:
            self._step_begun_s += secs
        self._ledger.spent(category, secs, time.monotonic())

    # During training

    def switch(self, category: Category) -> None:
        self._add_steps()
        self._doing = category
        self._ledger.switch(category, time.monotonic())

    def begin_step(self) -> None:
        self._step_begun_s = self.windows.begin_step()
        if self._is_first:
            return
        if self._doing is not Category.OTHER:  # after a validation that has failed
            self.switch(Category.OTHER)
        self._doing = Category.STEP  # the ledger gets the time later

    def end_step(self, batches: int, loss: Any) -> None:
        now_s = self.windows.end_step()
        if self._doing is Category.STEP:
            self._doing = Category.OTHER
            self._in_steps_s += now_s - self._step_begun_s
        else:  # the first step, or one in which the model was evaluated
            self._is_first = False
            self.switch(Category.OTHER)
        self._last_step_s = unsuspended_s()
        self._loss = loss
        self.step += batches
        self._steps += batches
        if self.marker is not None:
            self.marker.store(self.step)
        if now_s >= self._window_ends_s:
            self.end_window()

    def _add_steps(self) -> None:
        """Moves the time in steps from "other" to them."""
        if self._doing is Category.STEP:
            now_s = time.perf_counter()
            self._in_steps_s += now_s - self._step_begun_s
            self._step_begun_s = now_s
        if self._in_steps_s:
            self._ledger.spent(Category.STEP, self._in_steps_s, time.monotonic())
            self._in_steps_s = 0.0

    def end_epoch(self, epoch: int, logs: Mapping[str, Any] | None) -> None:
        numbers = json_values.numbers(logs or {})
        if self._doing is Category.STEP:  # the data had ended when this step started
            self.switch(Category.OTHER)
        self.end_window()
        reporting.report(events.EpochEnded(epoch, self.step, numbers))

    def end_window(self) -> None:
        """Writes the use of the time since the last window."""
        if not self.is_open:
            return
        self._add_steps()
        now_s = time.monotonic()
        secs, steps, self._steps = self._ledger.take(now_s), self._steps, 0
        pause_s = min(max(_LEAST_SECS, _SHARE * (now_s - self._begun_s)), _MOST_SECS)
        self._window_ends_s = time.perf_counter() + pause_s
        report = self.windows.end_window()
        if report is not None:
            # Waiting time that is not known stays with the steps.
            waits_s = {
                Category.INPUT: report.input_total_s or 0.0,
                Category.SYNC: report.sync_total_s or 0.0,
            }
            secs = split(secs, Category.STEP, waits_s)
        loss = float(self._loss) if steps and isinstance(self._loss, int | float) else None
        self._write(self._now(), _window(self.step, steps, self.epoch, secs, report, loss))

    def close_if_over(self) -> None:
        """Closes the log if an error has ended its `fit`."""
        if self._fit is None or not self._fit.is_above(sys._getframe()):
            self.close()

    def close(self) -> None:
        reporting.listen_no_more(self)
        self.is_open = False
        for each in self._others:
            each.close()
        self._others = ()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _write(self, at: float, event: Event) -> None:
        if self._log is not None:
            self._log.append(self._line(at, event), is_minor=isinstance(event, Window))
        for each in self._others:
            each.on_event(at, event)

    def _now(self) -> float:
        """Returns seconds since 1970; within one `fit`, setting the clock has no effect."""
        return self._begun_at + (unsuspended_s() - self._at_s)

    # From the log's thread

    def lost(self, lines: int) -> bytes:
        return self._line(self._now(), events.LinesLost(lines))

    def beat(self) -> bytes | None:
        trains = sys._current_frames().get(self._trains)
        is_there = self._fit is not None and self._fit.is_above(trains)
        if not is_there:
            return None
        idle_s = round(unsuspended_s() - self._last_step_s, 3)
        return self._line(self._now(), events.Beat(self.step, str(self._doing), idle_s))

    def _line(self, at: float, event: Event) -> bytes:
        return to_line(Entry(at, self._source, event, self._job, self._attempt))


def _window(
    step: int,
    steps: int,
    epoch: int,
    secs: Mapping[Category, float],
    report: StepReport | None,
    loss: float | None,
) -> Window:
    rounded = {str(category): round(each_s, 6) for category, each_s in secs.items()}
    # Two clocks are read one after the other, so "other" may be less than nothing by microseconds.
    spent = {category: each_s for category, each_s in rounded.items() if each_s > 0}
    if report is None:
        return Window(step, steps, epoch, spent, loss=loss)
    return Window(
        step,
        steps,
        epoch,
        spent,
        report.step_s,
        report.input_s,
        report.memory_bytes,
        tuple(ReplicaTimes(each.replica, each.compute_s, each.sync_s) for each in report.replicas),
        loss,
    )


@functools.cache
def _hear_of_errors() -> None:
    """Logs errors that end the process, in the log of the `fit` that they have ended."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        for listener in reporting.listeners():
            if isinstance(listener, FitLog):
                listener.on_event(events.Raised(f"{kind.__name__}: {error}"))

    sys.excepthook = hook


_has_begun = False  # a `fit` of this process


def _begun_s() -> float:
    """Returns the start of the process for its first `fit`, and now for others, by
    `time.monotonic`."""
    global _has_begun
    is_first, _has_begun = not _has_begun, True
    is_of_process = is_first and not is_interactive()
    return time.monotonic() - (time.time() - started_at() if is_of_process else 0.0)
