"""Goodput as scalars, and the events of a run as text, for TensorBoard."""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from keras_distplug.core import events
from keras_distplug.core.events import Entry, Event, Window
from keras_distplug.core.ledger import Category
from keras_distplug.core.log import announce
from keras_distplug.runlog import custom_charts, goodput_totals, incident_groups
from keras_distplug.runlog.event_files import EventFiles
from keras_distplug.runlog.goodput_totals import Fit, Span, Timeline

_LAST_SECS = 5.0
_THREAD = "keras_distplug-goodput"


class GoodputCurves:
    """Writes `goodput/...` after every window of the chief, and `distplug/events`, in a thread.

    TensorBoard's step is the number of seconds since the first attempt started, because a restart
    repeats training steps. Every event has its own step: of several with the same one, TensorBoard
    would keep only one.

    Args:
        files: The event files.
        earlier: Returns the log of the earlier attempts.
        begins_at: The start of this attempt, in seconds since 1970.
        resumes: Whether it may resume the earlier ones. Defaults to `True`.
        on_shares: Called from the thread with the step and the time at which a window ends, and the
            shares of the time until then. Defaults to none.
    """

    def __init__(
        self,
        files: EventFiles,
        earlier: Callable[[], tuple[list[Fit], list[Entry]]],
        begins_at: float,
        *,
        resumes: bool = True,
        on_shares: Callable[[int, float, Mapping[str, float | None]], None] | None = None,
    ) -> None:
        self._files = files
        self._earlier = earlier
        self._begins_at = begins_at
        self._resumes = resumes
        self._on_shares = on_shares
        self._step = 0
        self._totals = dict.fromkeys(Category, 0.0)
        self._lately: deque[Span] = deque()
        self._reported_at = 0  # TensorBoard's step of the last event
        self._given: queue.SimpleQueue[tuple[float, Event] | None] = queue.SimpleQueue()
        self._has_failed = self._has_layout = False
        self._thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)
        self._thread.start()

    def on_event(self, at: float, event: Event) -> None:
        self._given.put((at, event))

    def close(self) -> None:
        self._given.put(None)
        self._thread.join(_LAST_SECS)

    # How, in the thread

    def _run(self) -> None:
        try:
            self._write_all()
        except Exception as error:  # noqa: BLE001 (TensorFlow's own; and the log has all of it)
            announce(f"goodput is no longer written for TensorBoard: {error}")

    def _write_all(self) -> None:
        fits, supervised = self._earlier()
        made = self._after(fits, supervised)
        self._tell_of_earlier(goodput_totals.chiefs(fits), supervised)
        while (given := self._given.get()) is not None:
            at, event = given
            if not isinstance(event, Window):
                made.on_event(event)
                self._tell(at, event)
                continue
            self._take(made.take(at, event))
            self._write(at, event.step)
            try:
                self._files.flush_if_due()
            except OSError as error:
                if not self._has_failed:
                    announce(f"goodput cannot be written for TensorBoard ({error}); retrying")
                self._has_failed = True
        self._files.close()

    def _after(self, fits: Sequence[Fit], supervised: Sequence[Entry]) -> Timeline:
        if chiefs := goodput_totals.chiefs(fits):
            made, spans = goodput_totals.timeline(chiefs, supervised)
            self._first_at = spans[0].begin if spans else self._begins_at
            self._take(spans)
        else:
            starts = [entry.at for entry in supervised]
            self._first_at = min([self._begins_at, *starts])
            made = Timeline(self._first_at)
        self._take(made.begin(self._begins_at, resumes=self._resumes))
        self._step = round(max((span.end for span in self._lately), default=0) - self._first_at)
        return made

    def _tell_of_earlier(self, chiefs: Sequence[Fit], supervised: Sequence[Entry]) -> None:
        """Writes the supervisors' events since the last attempt, which wrote the others."""
        heard_at = max((fit.ends_at for fit in chiefs), default=-math.inf)
        entries = [*(entry for fit in chiefs for entry in fit.entries), *supervised]
        for entry in sorted(entries, key=lambda each: each.at):
            self._tell(entry.at, entry.event, is_new=entry.at > heard_at)

    def _tell(self, at: float, event: Event, *, is_new: bool = True) -> None:
        if (what := _in_words(event)) is None:
            return
        self._reported_at = max(self._reported_at + 1, round(at - self._first_at))
        if is_new:
            self._files.add_text("distplug/events", what, self._reported_at, at)

    def _take(self, spans: Iterable[Span]) -> None:
        for span in spans:
            for category, secs in span.secs.items():
                self._totals[category] += secs
            self._lately.append(span)

    def _write(self, at: float, trained: int) -> None:
        # TensorBoard drops everything before a step that decreases, as it may if a clock was set.
        step = self._step = max(self._step, round(at - self._first_at))
        whole_s = sum(self._totals.values())
        while self._lately and self._lately[0].end < at - 60 * max(goodput_totals.LATELY_MIN):
            self._lately.popleft()
        shares: dict[str, float | None] = {
            f"time/{category}": secs / whole_s
            for category, secs in self._totals.items()
            if secs and whole_s
        }
        shares["goodput/whole_run"] = goodput_totals.goodput(self._totals)
        lately = goodput_totals.goodput_lately(self._lately, self._first_at, at)
        shares |= {f"goodput/last_{minutes}_min": share for minutes, share in lately.items()}
        if not self._has_layout:
            custom_charts.write_layout(self._files, "Distplug", custom_charts.GOODPUT)
            self._has_layout = True
        if self._on_shares is not None:
            self._on_shares(trained, at, shares)
        for name, share in shares.items():
            if share is not None:
                self._files.add_scalar(name, share, step)


def _in_words(event: Event) -> str | None:
    match event:
        case events.Began():
            return f"training starts with {event.workers} workers, {event.replicas} replicas"
        case events.Restored():
            return f"training resumes after step {event.step}, from {event.checkpoint}"
        case events.Saved(is_local=False):
            return f"checkpoint of step {event.step}"
        case events.Finished():
            return f"training finished after step {event.step}"
        case _:
            what = incident_groups.in_words(event)
            return None if what is None else f"**{what}**"
