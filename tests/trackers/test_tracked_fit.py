"""The points and incidents that a `fit` sends to a tracker."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from trackers.recorded import Recorded

from keras_distplug.core import events
from keras_distplug.core.events import Began, Entry, Event
from keras_distplug.runlog.goodput_totals import Fit
from keras_distplug.runlog.tracked_fit import TrackedFit
from keras_distplug.storage.files import open_files
from keras_distplug.trackers import Outcome, Severity

BEGAN = Began("s2", 0, 2, 2, "host", 1, "MirroredStrategy", 3, 40, {"keras": "3.15.1"})


def tracked(folder: Path, tracker: Recorded, began: Began = BEGAN) -> TrackedFit:
    return TrackedFit([tracker], open_files(folder), "run-0001/log", began)


def window(step: int, **more: Any) -> events.Window:
    return events.Window(step, 5, 1, {"step": 0.5, "input": 0.5}, **more)


def before(*reported: Event) -> list[Fit]:
    """Returns an attempt that trained 48 steps, and saved after step 40."""
    began = dataclasses.replace(BEGAN, session="s1", step=0)
    entries = [
        Entry(100.0 + n, "worker-0", event)
        for n, event in enumerate((began, window(40), events.Saved(40, 0.1), window(48), *reported))
    ]
    return [Fit(began, tuple(entries))]


def test_metrics(tmp_path: Path) -> None:
    """Windows give speed, memory, goodput and the age of the checkpoint, and epochs their logs."""
    tracker = Recorded()
    made = tracked(tmp_path, tracker)
    made.on_event(1000.0, events.Saved(3, 0.1))
    made.on_event(1001.0, events.Saved(4, 0.1, is_local=True))
    made.on_event(1004.0, window(45, step_s=0.1, memory_bytes=2**21, loss=0.7))
    made.on_goodput(45, 1004.0, {"goodput/whole_run": 0.9, "goodput/last_5_min": None})
    made.on_event(1004.5, events.EpochEnded(1, 45, {"loss": 0.7, "val_loss": 0.8, "odd": None}))
    made.on_event(1005.0, events.Window(45, 0, 1, {"other": 1.0}))  # at the end, without a step
    made.on_event(1006.0, events.Finished(45, 3))
    made.close()
    point, epoch = tracker.points
    assert (epoch.step, epoch.is_epoch_end) == (45, True)
    assert epoch.metrics == {"loss": 0.7, "val_loss": 0.8, "distplug/epoch": 2}
    assert (point.step, point.at, point.is_epoch_end) == (45, 1004.0, False)
    assert point.metrics == {
        "distplug/running_loss": 0.7,
        "distplug/steps_per_second": 5.0,
        "distplug/step_ms": pytest.approx(100.0),
        "distplug/memory_mb": 2.0,
        "distplug/checkpoint_age_secs": 4.0,
        "distplug/goodput": 0.9,
    }
    assert tracker.runs[0].details["workers"] == 2
    assert tracker.runs[0].details["version_keras"] == "3.15.1"
    assert tracker.outcomes == [Outcome.FINISHED]


def test_incidents(tmp_path: Path) -> None:
    """Every kind of incident is an alert, with the text of the tab. There is at most one a minute
    per kind, and the next one counts the others. A tracker's own failure is not an incident."""
    tracker = Recorded()
    made = tracked(tmp_path, tracker)
    for at in (0.0, 10.0, 20.0, 61.0):
        made.on_event(at, events.UpdateLeftOut(0, what=f"NaN in `kernel` at {at}"))
    made.on_event(62.0, events.RolledBack(40, why="too many"))
    made.on_event(63.0, events.SlowReplica("compute", 1, "b", 0.2, is_over=True, what="fast again"))
    made.on_event(64.0, events.TrackerFailed("recorded", "ConnectionError"))
    made.on_event(65.0, events.SaveFailed(44, why="disk full"))
    made.on_event(66.0, events.Hung("worker-1 does not answer"))
    made.close()
    assert [(each.kind, each.severity) for each in tracker.incidents] == [
        ("update_left_out", Severity.WARNING),
        ("update_left_out", Severity.WARNING),
        ("rolled_back", Severity.WARNING),
        ("slow_replica", Severity.INFO),
        ("save_failed", Severity.WARNING),
        ("hung", Severity.ERROR),
    ]
    assert tracker.incidents[0].text == "NaN in `kernel` at 0.0"
    assert tracker.incidents[1].text == (
        "NaN in `kernel` at 61.0 (2 more since the last alert of this kind)"
    )
    assert tracker.outcomes == [Outcome.INTERRUPTED]


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ((), "attempt 1 ended: no message, so it was probably killed."),
        ((events.Hung("worker-1"),), "attempt 1 ended: hung: worker-1."),
    ],
)
def test_after_a_restart(last: tuple[Event, ...], said: str, tmp_path: Path) -> None:
    """A restart is an incident: how the previous attempt ended, which could not report it, and how
    many steps are trained again. The age of the checkpoint counts from its save."""
    tracker = Recorded()
    made = tracked(tmp_path, tracker)
    made.on_earlier_attempts(before(*last), [], 200.0)
    made.on_event(202.0, window(45))
    made.close()
    [incident] = tracker.incidents
    assert incident.text == (
        f"{said} Attempt 2 resumes after step 40, and 8 steps are trained again"
    )
    assert tracker.points[0].metrics["distplug/checkpoint_age_secs"] == 100.0


def test_more_epochs(tmp_path: Path) -> None:
    """Continuing a finished training for more epochs is not an incident."""
    tracker = Recorded()
    made = tracked(tmp_path, tracker)
    made.on_earlier_attempts(before(events.Finished(48, 3)), [], 200.0)
    made.close()
    assert tracker.incidents == []


def test_separate_runs(tmp_path: Path) -> None:
    """A `fit` that is not resumed has a separate run; attempts of one training share a run."""
    tracker = Recorded()
    for session, resumes in (("s1", True), ("s2", True), ("s3", False), ("s4", False)):
        began = dataclasses.replace(BEGAN, session=session, resumes=resumes)
        tracked(tmp_path, tracker, began).close()
    keys = [run.key for run in tracker.runs]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
    assert {run.name for run in tracker.runs} == {f"{tmp_path.name}/run-0001"}
