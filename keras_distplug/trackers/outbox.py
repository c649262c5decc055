"""The queue of points for a tracker, and the thread that sends it."""

from __future__ import annotations

import functools
import os
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from keras_distplug.core import reporting
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.core.events import TrackerFailed
from keras_distplug.core.log import announce
from keras_distplug.core.threads import call_before_threads_end
from keras_distplug.trackers.marks import Marks
from keras_distplug.trackers.tracker import Incident, Mark, Outcome, Point, TrackedRun, Tracker

_MOST = 5_000  # of what waits
_SETTLE_SECS = 1.0  # in which a step's metrics may still be completed
_AGAIN_SECS, _MOST_AGAIN_SECS = 5.0, 60.0  # after a failure
_LAST_SECS = 10.0
_LAST_SECS_INTERRUPTED = 3.0  # a preempted process has little time
_MEMBERS = ("name", "open", "log", "alert", "close")
_NAME = re.compile(r"[a-z0-9_-]+")


class Outbox:
    """Sends points and incidents to one tracker, in a thread, so that training never waits for it.

    If the tracker raises an error, that is reported once, and the same call is repeated after a
    pause. At most 5,000 points and incidents wait; beyond that the oldest points are dropped, and
    their number is reported at the end.

    Args:
        tracker: Who receives them.
        name: A name of the run for people.
        details: Details of this attempt.
        marks: The tracker's files in the folder of the training.
    """

    def __init__(
        self, tracker: Tracker, name: str, details: Mapping[str, str | int], marks: Marks
    ) -> None:
        self._tracker = tracker
        self._name, self._details = name, dict(details)
        self._marks = marks
        self._is_marking = True
        self._last = Mark()  # of what the tracker has
        self._least_step = 0  # of the next point, for a tracker that keeps one row per step
        self._waiting: deque[Point | Incident] = deque()
        self._put_s = 0.0  # when the last point was completed
        self._dropped = 0
        self._changed = threading.Condition()
        self._outcome: Outcome | None = None  # once it is closed
        self._is_hurried = self._is_sending = False
        self._thread = threading.Thread(
            target=self._run, name=f"keras_distplug-tracker-{tracker.name}", daemon=True
        )
        self._thread.start()
        _end_at_exit()
        _outboxes.add(self)

    def put(self, item: Point | Incident) -> None:
        """Adds a point or an incident, from any thread. Points of one step and kind become one."""
        with self._changed:
            last = self._waiting[-1] if self._waiting else None
            if isinstance(item, Point):
                self._put_s = time.monotonic()
                if isinstance(last, Point) and _get_mark(last) == _get_mark(item):
                    self._waiting[-1] = replace(last, metrics={**last.metrics, **item.metrics})
                    return
            self._waiting.append(item)
            if len(self._waiting) > _MOST:
                points = (n for n, each in enumerate(self._waiting) if isinstance(each, Point))
                del self._waiting[next(points, 0)]
                self._dropped += 1
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Returns whether the tracker has received everything, for which it waits this long."""
        with self._changed:
            self._is_hurried = True
            self._changed.notify_all()
            done = self._changed.wait_for(
                lambda: not self._waiting and not self._is_sending, timeout_s
            )
            self._is_hurried = False
        return done

    def end(self, outcome: Outcome) -> None:
        """Lets the thread send the rest and end; `join` waits for it."""
        with self._changed:
            self._outcome = self._outcome or outcome
            self._changed.notify_all()

    @property
    def has_ended(self) -> bool:
        return self._outcome is not None

    def join(self, timeout_s: float, last_s: float) -> None:
        """Waits for the thread's end, and reports if it still runs after `last_s` in all."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            announce(
                f"{self._tracker.name} did not answer within {last_s:g} s at the end of this "
                "training. The last metrics or incidents may be missing there."
            )

    # How, in the thread

    def _run(self) -> None:
        if self._insist(self._open):
            while (item := self._next()) is not None:
                if not self._insist(functools.partial(self._send, item)):
                    with self._changed:
                        self._waiting.appendleft(item)
                    break
            else:
                self._insist(self._close)
        with self._changed:
            self._is_sending = False
            self._changed.notify_all()
            lost = len(self._waiting) + self._dropped
        if lost:
            announce(
                f"{self._tracker.name} did not receive all of this run. Missing messages: {lost}, "
                "each with the metrics of a step or an incident such as a restart."
            )

    def _insist(self, act: Callable[[], None]) -> bool:
        """Calls `act` until it raises no error; returns False if this outbox ends before that."""
        pause_s, has_failed = _AGAIN_SECS, False
        while True:
            try:
                act()
            except BaseException as error:  # noqa: BLE001 (whatever a tracker raises)
                if not has_failed:
                    self._report(error)
                has_failed = True
                with self._changed:
                    if self._changed.wait_for(lambda: self._outcome is not None, pause_s):
                        return False
                pause_s = min(2 * pause_s, _MOST_AGAIN_SECS)
            else:
                if has_failed:
                    announce(f"{self._tracker.name} is receiving metrics again")
                return True

    def _report(self, error: BaseException) -> None:
        why = f"{type(error).__name__}: {error}"
        announce(
            f"{self._tracker.name} is not receiving updates from this run ({why}); retrying for "
            "as long as training runs"
        )
        reporting.report(TrackerFailed(self._tracker.name, why))

    def _open(self) -> None:
        marks = self._marks
        known = self._tracker.open(TrackedRun(marks.key(), self._name, self._details))
        self._is_marking = known is None
        self._last = marks.last() if known is None else known
        # Its row of this step may be complete: then the epoch's logs come with the next step.
        self._least_step = self._last.step + 1 if known is None else 0

    def _next(self) -> Point | Incident | None:
        """Returns what to send next, once there is something; None at the end."""
        with self._changed:
            self._is_sending = False
            self._changed.notify_all()
            while not self._waiting or (left_s := self._settles_in()) > 0:
                if not self._waiting and self._outcome is not None:
                    return None
                self._changed.wait(left_s if self._waiting else None)
            self._is_sending = True
            return self._waiting.popleft()

    def _settles_in(self) -> float:
        """Seconds for which the oldest item may still change."""
        is_newest = len(self._waiting) == 1 and isinstance(self._waiting[0], Point)
        if not is_newest or self._is_hurried or self._outcome is not None:
            return 0.0
        return self._put_s + _SETTLE_SECS - time.monotonic()

    def _send(self, item: Point | Incident) -> None:
        if isinstance(item, Incident):
            self._tracker.alert(item)
        elif (mark := _get_mark(item)) > self._last:  # an attempt before logged others, as they are
            if self._is_marking:
                self._marks.mark(mark)
            self._tracker.log(replace(item, step=max(item.step, self._least_step)))
            self._last = mark

    def _close(self) -> None:
        assert self._outcome is not None
        self._tracker.close(self._outcome)


def _get_mark(point: Point) -> Mark:
    return Mark(point.step, point.is_epoch_end)


def end_all(outboxes: Sequence[Outbox], outcome: Outcome) -> None:
    """Ends outboxes concurrently; waits a short time for the points that are not yet sent."""
    outboxes = [each for each in outboxes if not each.has_ended]
    for outbox in outboxes:
        outbox.end(outcome)
    last_s = _LAST_SECS if outcome is Outcome.FINISHED else _LAST_SECS_INTERRUPTED
    deadline_s = time.monotonic() + last_s
    for outbox in outboxes:
        outbox.join(max(deadline_s - time.monotonic(), 0.0), last_s)


_outboxes: weakref.WeakSet[Outbox] = weakref.WeakSet()


@functools.cache
def _end_at_exit() -> None:
    call_before_threads_end(lambda: end_all(list(_outboxes), Outcome.INTERRUPTED))
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_outboxes.clear)  # whose threads the child has not


def require_trackers(trackers: object) -> tuple[Tracker, ...]:
    """Checks the trackers that a user gives.

    Raises:
        ConfigurationError: If one lacks a method, or two have the same name.
    """
    if isinstance(trackers, str) or not isinstance(trackers, Iterable):
        trackers = [trackers]
    given = tuple(trackers)
    for each in given:
        missing = [name for name in _MEMBERS if getattr(each, name, None) is None]
        if missing or isinstance(each, type | str):
            shown = repr(each) if isinstance(each, type | str) else type(each).__name__
            lacks = missing and not isinstance(each, type | str)
            without = f" without {', '.join(missing)}" if lacks else ""
            raise ConfigurationError(
                "Expected every item of `trackers` to be a tracker, such as "
                "keras_distplug.WandbTracker(project='mnist') or another object with the methods "
                f"of keras_distplug.trackers.Tracker. Received: {shown}{without}. Pass an "
                "instance that has `name`, `open`, `log`, `alert` and `close`."
            )
        if not _NAME.fullmatch(each.name):
            raise ConfigurationError(
                "Expected a tracker's `name` to consist of lowercase letters, digits, `_` and `-`. "
                f"Received: {each.name!r}"
            )
    names = [each.name for each in given]
    if len(set(names)) < len(names):
        raise ConfigurationError(
            f"Expected trackers with different names. Received: {', '.join(names)}. To use "
            "two trackers of the same class, subclass it and set a different `name` there."
        )
    return given
