"""Goodput as curves for TensorBoard."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tensorboard.summary import Writer

from keras_distplug.core import goodput
from keras_distplug.core.events import Entry, Window
from keras_distplug.core.goodput import Fit, Span, Timeline
from keras_distplug.core.ledger import Category
from keras_distplug.core.log import announce

_MINUTES = (1, 5, 15)
_FLUSH_SECS = 5.0
_LAST_SECS = 5.0
_THREAD = "keras_distplug-goodput"


class GoodputCurves:
    """Writes `goodput/...` behind each window of the chief's, in a thread.

    TensorBoard's step is the number of seconds since the first attempt began, for what is trained
    again has the number of a step that was there before.

    Args:
        folder: For TensorBoard's file.
        earlier: Gives what the attempts before this one have told.
        begins_at: When this one began, in seconds since 1970.
    """

    def __init__(
        self,
        folder: Path,
        earlier: Callable[[], tuple[list[Fit], list[Entry]]],
        begins_at: float,
    ) -> None:
        self._folder = folder
        self._earlier = earlier
        self._begins_at = begins_at
        self._totals = dict.fromkeys(Category, 0.0)
        self._lately: deque[Span] = deque()
        self._given: queue.SimpleQueue[tuple[float, Window] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)
        self._thread.start()

    def add(self, at: float, window: Window) -> None:
        self._given.put((at, window))

    def close(self) -> None:
        self._given.put(None)
        self._thread.join(_LAST_SECS)

    # How, in the thread

    def _run(self) -> None:
        try:
            self._write_all()
        except Exception as error:  # noqa: BLE001 (TensorFlow's own; and the log has all of it)
            announce(f"goodput is not shown in TensorBoard's charts: {error}")

    def _write_all(self) -> None:
        made = self._after(*self._earlier())
        writer, flushed_s = Writer(str(self._folder)), time.monotonic()
        while (given := self._given.get()) is not None:
            self._take(made.take(*given))
            self._write(writer, given[0])
            if time.monotonic() - flushed_s >= _FLUSH_SECS:
                writer.flush()
                flushed_s = time.monotonic()
        writer.close()

    def _after(self, fits: Sequence[Fit], supervised: Sequence[Entry]) -> Timeline:
        if chiefs := goodput.chiefs(fits):
            made, spans = goodput.timeline(chiefs, supervised)
            self._first_at = spans[0].begin if spans else self._begins_at
            self._take(spans)
        else:
            starts = [entry.at for entry in supervised]
            self._first_at = min([self._begins_at, *starts])
            made = Timeline(self._first_at)
        self._take(made.begin(self._begins_at))
        return made

    def _take(self, spans: Iterable[Span]) -> None:
        for span in spans:
            for category, secs in span.secs.items():
                self._totals[category] += secs
            self._lately.append(span)

    def _write(self, writer: Any, at: float) -> None:
        step = round(at - self._first_at)
        whole_s = sum(self._totals.values())
        while self._lately and self._lately[0].end < at - 60 * max(_MINUTES):
            self._lately.popleft()
        shares: dict[str, float | None] = {
            f"time/{category}": secs / whole_s
            for category, secs in self._totals.items()
            if secs and whole_s
        }
        shares["goodput/whole_run"] = goodput.goodput(self._totals)
        for minutes in _MINUTES:
            if at - self._first_at > 60 * minutes:
                secs = goodput.totals(self._lately, at - 60 * minutes)
                shares[f"goodput/last_{minutes}_min"] = goodput.goodput(secs)
        for name, share in shares.items():
            if share is not None:
                writer.add_scalar(name, share, step)
