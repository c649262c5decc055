"""Finding the worker that the others wait for, from the reports of all workers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]

from cluster.key_values import Memory  # noqa: E402

from keras_distplug.cluster.channel import Channel  # noqa: E402
from keras_distplug.cluster.roles import Role  # noqa: E402
from keras_distplug.hang import verdict as hangs  # noqa: E402
from keras_distplug.hang.verdict import ClusterInquiry, Inquiry, Report, judge  # noqa: E402

LATE = Report(7, "is in batch 3", awaits=None, for_s=30.0, limit_s=30.0, silence_s=30.0)
IN_TIME = replace(LATE, for_s=20.0)


@pytest.mark.parametrize(
    ("reports", "named"),
    [
        ([LATE, None], "b did not answer"),
        ([LATE, None, None], "b and c did not answer"),
        ([replace(LATE, moments=8), LATE], "b is in batch 3"),
        ([LATE, replace(LATE, awaits="input")], "b is in batch 3"),
        ([replace(LATE, awaits="others"), LATE], "b is in batch 3"),
        # The others wait for the slowest worker, even if that is waiting itself.
        ([replace(LATE, moments=8, awaits="input"), LATE], "b is in batch 3"),
        ([LATE], "a is in batch 3, for 30.0 s"),
    ],
)
def test_worker_is_named(reports: list[Report | None], named: str) -> None:
    """The worker that the others wait for is named, and no other."""
    verdict = judge(dict(zip("abc", reports, strict=False)))
    assert verdict.hang is not None
    assert verdict.hang.startswith(named)
    assert "; " not in verdict.hang
    assert "collectives" not in verdict.hang


def test_silent_worker_is_named() -> None:
    """A worker that has not answered for longer than the silence limit is named, and no other."""
    verdict = judge({"a": LATE, "b": None, "c": None}, silent_for_s={"b": 29.0, "c": 30.0})
    assert verdict.hang is not None
    assert verdict.hang.startswith("c did not answer")


@pytest.mark.parametrize(
    ("reports", "look_again_s"),
    [
        ([replace(LATE, moments=8), IN_TIME], 10),
        ([replace(LATE, moments=8), replace(LATE, for_s=27.0)], 3),
        ([LATE, replace(LATE, for_s=29.0)], 1),
        ([replace(LATE, silence_s=36.0), None], 6),
    ],
)
def test_within_the_time_limit(reports: list[Report | None], look_again_s: float) -> None:
    """Workers within their limits are waited for; the stage of a silent one is unknown."""
    verdict = judge(dict(zip("ab", reports, strict=False)))
    assert verdict.hang is None
    assert verdict.look_again_s == look_again_s


def test_no_slowest_worker() -> None:
    """If no worker is slower than the others, all of them are named."""
    verdict = judge({"a": LATE, "b": replace(LATE, doing="runs train.py:3")})
    assert verdict.hang is not None
    assert "a is in batch 3" in verdict.hang
    assert "b runs train.py:3" in verdict.hang
    assert "the same collectives" in verdict.hang


def test_alone() -> None:
    """A single process is overdue by its own limit."""
    assert Inquiry("a", lambda: LATE).ask().hang == "a is in batch 3, for 30.0 s"
    assert Inquiry("a", lambda: IN_TIME).ask().hang is None


class Cluster:
    """Workers that can be asked.

    Attributes:
        reports: The reports by worker. A worker without one is frozen: it has no mailbox.

    """

    def __init__(self, reports: list[Report | None], memory: Memory | None = None) -> None:
        self.memory = memory or Memory()
        self.heard: dict[int, str] = {}
        self.all_heard = threading.Semaphore(0)
        addresses = {"worker": tuple(f"host:{n}" for n in range(len(reports)))}
        self.inquiries = {
            rank: self._inquiry(Role("worker", rank, addresses, "a test"), report)
            for rank, report in enumerate(reports)
            if report is not None
        }

    def _inquiry(self, role: Role, report: Report) -> ClusterInquiry:
        def receive(hang: str) -> None:
            self.heard[role.rank] = hang
            self.all_heard.release()

        channel = Channel(role, self.memory, "session/")
        return ClusterInquiry(channel, lambda: report, receive)


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Cluster]]:
    monkeypatch.setattr(hangs, "_ANSWER_S", 0.5)
    made: list[Cluster] = []
    yield made
    for cluster in made:
        for each in cluster.inquiries.values():
            each.close()


@pytest.mark.parametrize("asks", [0, 1])
def test_all_workers_are_notified(asks: int, clusters: list[Cluster]) -> None:
    """Whichever worker asks, all of them receive the result."""
    cluster = Cluster([LATE, replace(LATE, moments=8), replace(LATE, moments=8)])
    clusters.append(cluster)
    verdict = cluster.inquiries[asks].ask()
    assert verdict.hang == "worker-0 is in batch 3, for 30.0 s"
    cluster.inquiries[asks].report_hang(verdict.hang)
    for _ in range(3):
        assert cluster.all_heard.acquire(timeout=20)
    assert cluster.heard == dict.fromkeys(range(3), verdict.hang)


def test_repeated_inquiries(clusters: list[Cluster]) -> None:
    """Inquiries can be repeated, and run concurrently."""
    cluster = Cluster([replace(LATE, moments=8), IN_TIME])
    clusters.append(cluster)
    verdicts = []
    threads = [
        threading.Thread(target=lambda each=each: verdicts.extend(each.ask() for _ in range(5)))  # type: ignore[misc]
        for each in cluster.inquiries.values()
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert [verdict.look_again_s for verdict in verdicts] == [10.0] * 10


def test_frozen_worker(clusters: list[Cluster]) -> None:
    """A worker that does not answer is named, and not waited for at the end."""
    cluster = Cluster([LATE, None])
    clusters.append(cluster)
    verdict = cluster.inquiries[0].ask()
    assert verdict.hang is not None
    assert verdict.hang.startswith("worker-1 did not answer")
    cluster.inquiries[0].report_hang(verdict.hang)
    cluster.inquiries[0].leave()
    assert cluster.memory.values["keras_distplug/told/session/left/0"] == ""


def test_recent_answer_counts(clusters: list[Cluster]) -> None:
    """A worker that answered recently is not considered frozen after one missing answer."""
    cluster = Cluster([replace(LATE, moments=8), IN_TIME])
    clusters.append(cluster)
    assert cluster.inquiries[0].ask().look_again_s == 10
    cluster.inquiries[1].close()
    verdict = cluster.inquiries[0].ask()
    assert verdict.hang is None
    assert verdict.look_again_s == 10


def test_no_answers(clusters: list[Cluster]) -> None:
    """If no answer arrives in time, not even to this worker's own messages, the others are the
    silent ones."""
    cluster = Cluster([LATE, None])
    clusters.append(cluster)
    cluster.inquiries[0].close()
    verdict = cluster.inquiries[0].ask()
    assert verdict.hang is not None
    assert verdict.hang.startswith("worker-1 did not answer")


class Counted(Memory):
    """Counts the attempts to send messages, by key."""

    def __init__(self) -> None:
        super().__init__()
        self.tried: Counter[str] = Counter()

    def put_first(self, key: str, value: str) -> bool:
        self.tried[key] += 1
        return super().put_first(key, value)


def test_no_extra_messages(clusters: list[Cluster]) -> None:
    """Regardless of earlier inquiries, no message is sent under the key of another message."""
    memory = Counted()
    cluster = Cluster([replace(LATE, moments=8), IN_TIME], memory)
    clusters.append(cluster)
    for _ in range(4):
        cluster.inquiries[0].ask()
    assert memory.tried["keras_distplug/told/session/letter/1/3"] == 1
    assert set(memory.tried.values()) == {1}


class Frozen(Memory):
    """The messages of a frozen chief: sending blocks."""

    def put_first(self, key: str, value: str) -> bool:
        threading.Event().wait(20)
        return True


def test_frozen_chief(clusters: list[Cluster]) -> None:
    """The chief stores the messages: a worker that cannot get one has detected the loss."""
    cluster = Cluster([None, LATE], Frozen())
    verdict = cluster.inquiries[1].ask()
    assert verdict.hang is not None
    assert verdict.hang.startswith("worker-0 did not answer")
    cluster.inquiries[1].report_hang(verdict.hang)
    cluster.inquiries[1].leave()


def test_lost_messages(clusters: list[Cluster]) -> None:
    """If other workers can no longer be asked, every worker reports its own state."""
    cluster = Cluster([LATE, IN_TIME])
    clusters.append(cluster)
    cluster.memory.breaks_at = "keras_distplug/told/session/letter/0/0"
    late, in_time = (each.ask() for each in cluster.inquiries.values())
    assert late.hang is not None
    assert late.hang.startswith("worker-0 is in batch 3, for 30.0 s; the other workers cannot be")
    assert in_time.hang is None


def test_chief_exits_last(clusters: list[Cluster]) -> None:
    """The chief exits after the others."""
    cluster = Cluster([LATE, LATE])
    clusters.append(cluster)
    chief = threading.Thread(target=cluster.inquiries[0].leave)
    hangs._ANSWER_S = 60.0
    chief.start()
    assert cluster.memory.wait_for("keras_distplug/told/session/left/0")
    assert chief.is_alive()
    cluster.inquiries[1].leave()
    chief.join(20)
    assert not chief.is_alive()
