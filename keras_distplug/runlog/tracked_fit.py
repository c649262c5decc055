"""One `fit` as experiment trackers see it: metrics over steps, and incidents."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from keras_distplug.core import events
from keras_distplug.core.events import Began, Entry, Event, Window
from keras_distplug.runlog import goodput_totals, incident_groups
from keras_distplug.runlog.goodput_totals import Fit
from keras_distplug.storage.files import Files
from keras_distplug.trackers.marks import Marks
from keras_distplug.trackers.outbox import Outbox, end_all
from keras_distplug.trackers.tracker import Incident, Outcome, Point, Severity, Tracker

_FOLDER = "trackers"
_PAUSE_SECS = 60.0  # between two incidents of a kind
_HUNG_SECS = 3.0  # for the last incident of a process that is about to be killed
_ERRORS = (
    events.Hung,
    events.Raised,
    events.PeerLost,
    events.Failed,
    events.Diverged,
)
_SHOWN = {"goodput/whole_run": "distplug/goodput", "goodput/last_5_min": "distplug/goodput_5_min"}


class TrackedFit:
    """Turns what the chief of one `fit` reports into points and incidents.

    Args:
        trackers: The trackers that receive them.
        files: The directory of the run.
        folder: The folder of the run's log, in that directory.
        began: The first event of this `fit`.
    """

    def __init__(
        self, trackers: Sequence[Tracker], files: Files, folder: str, began: Began
    ) -> None:
        # A `fit` that nothing resumes is a separate training.
        place = f"{folder}/{_FOLDER}" if began.resumes else f"{folder}/{_FOLDER}/{began.session}"
        name = "/".join(PurePosixPath(files.where(folder)).parts[-3:-1])
        self._outboxes = [
            Outbox(each, name, _details(began), Marks(files, f"{place}/{each.name}"))
            for each in trackers
        ]
        self._began = began
        self._lock = threading.Lock()
        self._saved_at: float | None = None
        self._outcome = Outcome.INTERRUPTED
        self._alerted: dict[str, tuple[float, int]] = {}  # when, and how many were withheld since

    def on_event(self, at: float, event: Event) -> None:
        """From any thread."""
        match event:
            case Window():
                if event.steps:
                    self._put(Point(event.step, at, self._window(at, event)))
            case events.EpochEnded():
                known = {name: value for name, value in event.logs.items() if value is not None}
                known["distplug/epoch"] = event.epoch + 1.0
                self._put(Point(event.step, at, known, is_epoch_end=True))
            case events.Saved(is_local=False):
                self._saved_at = at
            case events.Finished():
                self._outcome = Outcome.FINISHED
            case events.Raised():
                self._outcome = Outcome.FAILED
        if (
            isinstance(event, events.TrackerFailed)
            or (what := incident_groups.in_words(event)) is None
        ):
            return
        severity = Severity.ERROR if isinstance(event, _ERRORS) else Severity.WARNING
        if isinstance(event, events.SlowReplica) and event.is_over:
            severity = Severity.INFO
        self._alert(Incident(at, events.get_name(type(event)), what, severity))
        if isinstance(event, events.Hung):
            for outbox in self._outboxes:
                outbox.flush(_HUNG_SECS)

    def on_earlier_attempts(
        self, fits: Sequence[Fit], supervised: Sequence[Entry], at: float
    ) -> None:
        """Takes what the attempts before this one have reported."""
        saved = [
            entry.at
            for fit in goodput_totals.chiefs(fits)
            for entry in fit.entries
            if isinstance(entry.event, events.Saved) and not entry.event.is_local
        ]
        if saved and self._saved_at is None:
            self._saved_at = max(saved)
        before = goodput_totals.attempts(fits, supervised)
        if not before or not self._began.resumes:
            return
        last, step = before[-1], self._began.step
        if last.end == "finished":
            return
        lost = max(0, last.last_step - step)
        again = f", and {lost} steps are trained again" if lost else ""
        what = (
            f"attempt {len(before)} ended: {last.end or 'no message, so it was probably killed'}. "
            f"Attempt {len(before) + 1} resumes after step {step}{again}"
        )
        self._alert(Incident(at, "resumed", what, Severity.WARNING))

    def on_goodput(self, step: int, at: float, shares: Mapping[str, float | None]) -> None:
        """Takes shares of the time until a window's end, by the names of TensorBoard's curves."""
        shown = {
            name: value for key, name in _SHOWN.items() if (value := shares.get(key)) is not None
        }
        if shown:
            self._put(Point(step, at, shown))

    def close(self) -> None:
        """Waits a short time for the points that are not yet sent."""
        end_all(self._outboxes, self._outcome)

    def _window(self, at: float, window: Window) -> dict[str, float]:
        secs = sum(window.secs.values())
        found = {
            "distplug/running_loss": window.loss,
            "distplug/steps_per_second": window.steps / secs if secs > 0 else None,
            "distplug/step_ms": None if window.step_s is None else 1e3 * window.step_s,
            "distplug/input_ms": None if window.input_s is None else 1e3 * window.input_s,
            "distplug/memory_mb": window.memory_bytes and window.memory_bytes / 2**20,
            "distplug/checkpoint_age_secs": None if self._saved_at is None else at - self._saved_at,
        }
        return {name: float(value) for name, value in found.items() if value is not None}

    def _put(self, point: Point) -> None:
        for outbox in self._outboxes:
            outbox.put(point)

    def _alert(self, incident: Incident) -> None:
        with self._lock:
            last_at, withheld = self._alerted.get(incident.kind, (float("-inf"), 0))
            if incident.at - last_at < _PAUSE_SECS:
                self._alerted[incident.kind] = (last_at, withheld + 1)
                return
            self._alerted[incident.kind] = (incident.at, 0)
        if withheld:
            text = f"{incident.text} ({withheld} more since the last alert of this kind)"
            incident = Incident(incident.at, incident.kind, text, incident.severity)
        for outbox in self._outboxes:
            outbox.put(incident)


def _details(began: Began) -> dict[str, str | int]:
    versions = {f"version_{package}": version for package, version in began.versions.items()}
    return {
        "workers": began.workers,
        "replicas": began.replicas,
        "strategy": began.strategy,
        "epochs": began.epochs,
        "host": began.host,
        **versions,
    }
