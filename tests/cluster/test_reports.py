"""Reports of all workers, collected by the chief."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest
from cluster.key_values import Memory

from keras_distplug.cluster.channel import Channel
from keras_distplug.cluster.listeners import Reports
from keras_distplug.cluster.roles import Role
from keras_distplug.core.errors import AgreementError

pytestmark = pytest.mark.timeout(60)

WORKERS = 3
CLUSTER = {"worker": tuple(f"127.0.0.1:{port}" for port in range(WORKERS))}


@dataclass
class Calls:
    """Collects the calls on the chief."""

    together: list[list[str]] = field(default_factory=list)
    lost: list[AgreementError] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def note(self, reports: list[str]) -> None:
        with self.changed:
            self.together.append(reports)
            self.changed.notify_all()

    def note_loss(self, error: AgreementError) -> None:
        with self.changed:
            self.lost.append(error)
            self.changed.notify_all()

    def wait_for(self, *, together: int = 0, lost: int = 0) -> None:
        with self.changed:
            assert self.changed.wait_for(
                lambda: len(self.together) >= together and len(self.lost) >= lost, 30
            )


class Workers:
    def __init__(self) -> None:
        self.store = Memory()
        self.heard = Calls()
        self.others = Calls()
        self.all = []
        for rank in range(WORKERS):
            role = Role("worker", rank, CLUSTER, source="a test")
            heard = self.others if rank else self.heard
            channel = Channel(role, self.store, "a session/")
            self.all.append(Reports(channel, heard.note, heard.note_loss))


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    for each in made.all:
        each.close()


def test_together(workers: Workers) -> None:
    """The n-th reports of all workers arrive together, by rank, and are deleted from the store."""
    for number in range(5):
        for rank in (2, 0, 1):
            workers.all[rank].send(partial(str, f"{rank} says {number}"))
    workers.heard.wait_for(together=5)
    assert workers.heard.together == [
        [f"{rank} says {number}" for rank in range(WORKERS)] for number in range(5)
    ]
    assert workers.others.together == []
    for each in workers.all:
        each.close()
    assert workers.store.values == {}


def test_missing_report(workers: Workers) -> None:
    """The chief gets no reports before all workers have reported."""
    workers.all[1].send(lambda: "1")
    workers.all[0].send(lambda: "0")
    assert workers.heard.together == []
    workers.all[2].send(lambda: "2")
    workers.heard.wait_for(together=1)


def test_close_with_a_missing_report(workers: Workers) -> None:
    """Closing does not wait for reports that will never arrive."""
    workers.all[0].send(lambda: "0")
    for each in workers.all:
        each.close()
        assert not each._thread.is_alive()
    assert workers.heard.together == []
    assert workers.heard.lost == []


def test_lost_worker(workers: Workers) -> None:
    """A lost worker is reported once, and closing does not wait for it."""
    workers.store.breaks_at = "keras_distplug/told/a session/report/0/1"
    workers.all[0].send(lambda: "0")
    workers.all[0].send(lambda: "0")
    workers.heard.wait_for(lost=1)
    workers.all[1].send(lambda: "1")
    workers.others.wait_for(lost=1)
    assert "lost another worker" in str(workers.heard.lost[0])
    assert workers.heard.together == []


def test_report_that_cannot_be_made(workers: Workers) -> None:
    def make() -> str:
        raise AgreementError("no answer")

    workers.all[1].send(make)
    workers.others.wait_for(lost=1)
    assert str(workers.others.lost[0]) == "no answer"


def test_reports_in_progress(workers: Workers) -> None:
    """Closing waits for reports in progress, if requested."""
    workers.all[0].send(lambda: "0")
    ends = threading.Thread(target=workers.all[0].close, args=(30,))
    ends.start()
    for rank in (1, 2):
        workers.all[rank].send(partial(str, rank))
        workers.all[rank].close(30)
    ends.join(30)
    assert workers.heard.together == [["0", "1", "2"]]


@pytest.mark.parametrize("where", ["made", "taken"])
def test_failure(where: str, workers: Workers) -> None:
    """Other errors are raised by the next report."""

    def fail(*_: object) -> str:
        raise ZeroDivisionError("a bug")

    reports = workers.all[0]
    if where == "made":
        reports.send(fail)
    else:
        reports._on_all = fail
        for each in workers.all:
            each.send(lambda: "report")
    reports._thread.join(30)
    with pytest.raises(RuntimeError, match="no longer report to the chief: a bug"):
        reports.send(lambda: "another")
