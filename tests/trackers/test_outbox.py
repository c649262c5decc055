"""A tracker receives everything once and in order; one that fails or hangs costs nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trackers.recorded import Recorded

from keras_distplug.core import events, reporting
from keras_distplug.core.errors import ConfigurationError
from keras_distplug.storage.files import open_files
from keras_distplug.trackers import Incident, Outcome, Point, outbox
from keras_distplug.trackers.marks import Marks
from keras_distplug.trackers.outbox import Outbox, end_all, require_trackers


class Listener:
    def __init__(self) -> None:
        self.events: list[events.Event] = []

    def on_event(self, event: events.Event) -> None:
        self.events.append(event)

    def spent(self, category: Any, secs: float) -> None:
        pass


@pytest.fixture
def reports() -> Iterator[Listener]:
    listener = Listener()
    reporting.listen(listener)
    yield listener
    reporting.listen_no_more(listener)


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "_AGAIN_SECS", 0.01)
    monkeypatch.setattr(outbox, "_LAST_SECS", 1.0)


def marks(folder: Path) -> Marks:
    return Marks(open_files(folder), "run-0001/log/trackers/recorded")


def box(tracker: Recorded, folder: Path) -> Outbox:
    return Outbox(tracker, "mnist/run-0001", {"workers": 1}, marks(folder))


def point(step: int, *, epoch: bool = False, **metrics: float) -> Point:
    return Point(step, 1000.0 + step, metrics or {"loss": 1.0 / (step + 1)}, epoch)


def test_order(tmp_path: Path) -> None:
    """Points and incidents arrive in order, from the outbox's own thread; then it is closed."""
    tracker = Recorded()
    sent = box(tracker, tmp_path)
    for step in (1, 2, 5):
        sent.put(point(step))
    sent.put(Incident(1.0, "hung", "worker-1 does not answer"))
    end_all([sent], Outcome.FINISHED)
    assert tracker.steps == [1, 2, 5]
    assert [each.kind for each in tracker.incidents] == ["hung"]
    assert tracker.outcomes == [Outcome.FINISHED]
    assert tracker.threads == {"keras_distplug-tracker-recorded"}
    assert (tracker.runs[0].name, tracker.runs[0].details) == ("mnist/run-0001", {"workers": 1})


def test_one_point_per_step(tmp_path: Path) -> None:
    """A window and its goodput are one point; the epoch that ends there is another one, however
    much later its validation ends. Points are dropped after one of a later step."""
    tracker = Recorded()
    sent = box(tracker, tmp_path)
    sent.put(point(4, loss=0.5))
    sent.put(point(4, goodput=0.9))
    assert sent.flush(10)
    sent.put(point(4, epoch=True, val_loss=0.6))
    sent.put(point(5, loss=0.4))
    sent.put(point(4, goodput=0.8))
    end_all([sent], Outcome.FINISHED)
    assert [(each.step, each.metrics) for each in tracker.points] == [
        (4, {"loss": 0.5, "goodput": 0.9}),
        (4, {"val_loss": 0.6}),
        (5, {"loss": 0.4}),
    ]


def test_newest_point_arrives(tmp_path: Path) -> None:
    """The newest point does not wait for another one."""
    tracker = Recorded()
    sent = box(tracker, tmp_path)
    sent.put(point(1))
    deadline_s = time.monotonic() + 20
    while not tracker.points and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert tracker.steps == [1]
    end_all([sent], Outcome.FINISHED)


@pytest.mark.parametrize("knows", [False, True])
def test_after_a_kill(knows: bool, tmp_path: Path) -> None:
    """The next attempt continues the run with the same key, and logs no step twice, whether the
    tracker knows its last step or not."""
    tracker = Recorded(knows=knows)
    first = box(tracker, tmp_path)
    for step in (2, 4, 6):
        first.put(point(step))
    assert first.flush(10)  # and then it is killed
    second = box(tracker, tmp_path)
    for step in (3, 5, 6, 7, 9):
        second.put(point(step))
    end_all([second], Outcome.FINISHED)
    assert tracker.steps == [2, 4, 6, 7, 9]
    assert len({run.key for run in tracker.runs}) == 1
    first.end(Outcome.FINISHED)


@pytest.mark.parametrize(("knows", "step"), [(False, 5), (True, 4)])
def test_killed_while_it_validates(knows: bool, step: int, tmp_path: Path) -> None:
    """The epoch's logs are not lost even if its last step was already logged. A tracker with one
    row per step that may be complete gets them with the next step."""
    tracker = Recorded(knows=knows)
    first = box(tracker, tmp_path)
    first.put(point(4))
    assert first.flush(10)
    second = box(tracker, tmp_path)
    for each in (point(4), point(4, epoch=True, val_loss=0.6), point(5)):
        second.put(each)
    assert second.flush(10)
    third = box(tracker, tmp_path)  # killed again, after the epoch's logs
    for each in (point(4), point(4, epoch=True, val_loss=0.6), point(5), point(6)):
        third.put(each)
    end_all([first, second, third], Outcome.FINISHED)
    assert [(each.step, *each.metrics) for each in tracker.points] == [
        (4, "loss"),
        (step, "val_loss"),
        (5, "loss"),
        (6, "loss"),
    ]


def test_mark_before_the_point(tmp_path: Path) -> None:
    """A step is marked before the tracker receives it, so that it is not logged twice after a kill
    in between. Only one mark is left, whatever their number."""
    tracker = Recorded()
    seen: list[int] = []

    def look(what: Any) -> None:
        if isinstance(what, Point):
            seen.append(marks(tmp_path).last().step)

    tracker.before = look
    sent = box(tracker, tmp_path)
    for step in (3, 8, 20):
        sent.put(point(step))
    end_all([sent], Outcome.FINISHED)
    assert seen == [3, 8, 20]
    assert len(list(tmp_path.rglob("*.step"))) == 1


def test_tracker_that_fails(
    tmp_path: Path, reports: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure is reported once, as a message and an event; nothing is lost or sent twice when the
    tracker works again, which is reported too."""
    tracker = Recorded()
    failures = iter(range(3))

    def fail(what: Any) -> None:
        if isinstance(what, Point) and what.step == 2 and next(failures, None) is not None:
            raise ConnectionError("no route to host")

    tracker.before = fail
    sent = box(tracker, tmp_path)
    for step in (1, 2, 3):
        sent.put(point(step))
    assert sent.flush(10)
    end_all([sent], Outcome.FINISHED)
    assert tracker.steps == [1, 2, 3]
    assert reports.events == [events.TrackerFailed("recorded", "ConnectionError: no route to host")]
    assert "recorded is not receiving updates from this run" in caplog.text
    assert "recorded is receiving metrics again" in caplog.text


def test_unreachable_server(
    tmp_path: Path, reports: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    """A tracker that never opens does not delay the end, and the points that it missed are
    counted."""
    tracker = Recorded()

    def fail(what: Any) -> None:
        raise SystemExit("even this")

    tracker.before = fail
    sent = box(tracker, tmp_path)
    for step in range(7):
        sent.put(point(step))
    started_s = time.monotonic()
    end_all([sent], Outcome.FINISHED)
    assert time.monotonic() - started_s < 0.9
    assert tracker.points == []
    assert len(reports.events) == 1
    assert "Missing messages: 7, each with" in caplog.text


def test_tracker_that_hangs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`put` never waits, the number of waiting points is limited, the oldest ones are dropped
    first, incidents are kept, and the end waits for a limited time."""
    tracker, release = Recorded(), threading.Event()
    tracker.before = lambda what: release.wait(60) and None
    sent = box(tracker, tmp_path)
    started_s = time.monotonic()
    sent.put(Incident(0.0, "hung", "worker-1"))
    for step in range(3 * outbox._MOST):
        sent.put(point(step))
    assert time.monotonic() - started_s < 5
    assert len(sent._waiting) == outbox._MOST
    assert isinstance(sent._waiting[0], Incident)
    assert not sent.flush(0.05)
    end_all([sent], Outcome.FINISHED)
    assert time.monotonic() - started_s < 10
    assert "did not answer within 1 s" in caplog.text
    release.set()


def test_repeated_end(tmp_path: Path) -> None:
    """Ending again, as at the end of the process, waits for nothing."""
    tracker, release = Recorded(), threading.Event()
    tracker.before = lambda what: release.wait(60) and None
    sent = box(tracker, tmp_path)
    end_all([sent], Outcome.FINISHED)
    started_s = time.monotonic()
    end_all([sent], Outcome.INTERRUPTED)
    assert time.monotonic() - started_s < 0.5
    release.set()


def test_forged_names(tmp_path: Path) -> None:
    """Files with other names in the folder are neither keys nor marks."""
    folder = tmp_path / "run-0001/log/trackers/recorded"
    folder.mkdir(parents=True)
    for name in ("../x.key", "x.key", "9.step", "9.epoch", "-00000000009.step"):
        (folder / name.replace("/", "_")).write_text("")
    key = marks(tmp_path).key()
    assert len(key) == 32
    assert marks(tmp_path).key() == key
    assert marks(tmp_path).last().step == -1


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("wandb", "Received: 'wandb'"),
        (["wandb"], "Received: 'wandb'"),
        ([Recorded], "Received: <class .*Recorded.>. Pass an instance"),
        ([object()], "Received: object"),
        ([Recorded("a/b")], "Received: 'a/b'"),
        ([Recorded(), Recorded()], "Received: recorded, recorded"),
    ],
)
def test_wrong_trackers(given: Any, why: str) -> None:
    """Objects that are not trackers are refused before training."""
    with pytest.raises(ConfigurationError, match=why):
        require_trackers(given)


def test_one_tracker() -> None:
    """A tracker outside a list is taken as a list of one."""
    tracker = Recorded()
    assert require_trackers(tracker) == require_trackers([tracker]) == (tracker,)
