"""Workers, simulated as threads, that are preempted while they train."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping

import pytest

pytest.importorskip("tensorflow")
pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]

from cluster.key_values import Memory  # noqa: E402

from keras_distplug.cluster import listeners  # noqa: E402
from keras_distplug.cluster.channel import Channel  # noqa: E402
from keras_distplug.cluster.roles import Role  # noqa: E402
from keras_distplug.core.errors import AgreementError  # noqa: E402
from keras_distplug.preemption.stopping import Cause, CollectiveStop, Stop  # noqa: E402

STEPS = 3000  # more than a message takes to arrive


class Cluster:
    """Workers that are never more than one step apart, as in synchronous training."""

    def __init__(self, workers: int, preempted: Mapping[int, int] | None = None) -> None:
        addresses = {"worker": tuple(f"host:{n}" for n in range(workers))}
        self.memory = Memory()
        self.lost: list[AgreementError] = []
        roles = [Role("worker", n, addresses, "a test") for n in range(workers)]
        self.stops = [
            CollectiveStop(Channel(role, self.memory, "session/"), self.lost.append)
            for role in roles
        ]
        self.preempted = preempted or {}
        self.all_reduce = threading.Barrier(workers)
        self.stopped: list[tuple[int, Cause | None]] = [(STEPS, None)] * workers
        self.threads = [
            threading.Thread(target=self._train, args=(n,), daemon=True) for n in range(workers)
        ]

    def _train(self, worker: int) -> None:
        for step in range(1, STEPS + 1):
            self.all_reduce.wait(60)
            if self.preempted.get(worker) == step:
                self.stops[worker].request(cause(worker))
            if (why := self.stops[worker].is_due()) is not None:
                self.stopped[worker] = (step, why)
                return

    def train(self) -> None:
        for each in self.threads:
            each.start()
        for each in self.threads:
            each.join(60)
            assert not each.is_alive()

    def close(self) -> None:
        for each in self.stops:
            each.close()
            assert not each._mailbox._thread.is_alive()


@pytest.fixture
def clusters() -> Iterator[list[Cluster]]:
    made: list[Cluster] = []
    yield made
    for each in made:
        each.close()


def cause(worker: int) -> Cause:
    return Cause("SIGTERM", f"worker-{worker}", 1.0)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("workers", [2, 3])
def test_same_step(workers: int, seed: int, clusters: list[Cluster]) -> None:
    """Whichever workers are notified, at whatever time, all stop soon, at the same step and for
    the same cause."""
    draw = random.Random(seed)
    preempted = draw.sample(range(workers), draw.randint(1, workers))
    steps = {worker: draw.randint(1, 9) for worker in preempted}
    cluster = Cluster(workers, steps)
    clusters.append(cluster)
    cluster.train()
    assert len(set(cluster.stopped)) == 1
    at, why = cluster.stopped[0]
    assert at >= min(steps.values())
    assert why in [cause(each) for each in preempted]
    assert cluster.lost == []


def test_no_preemption(clusters: list[Cluster]) -> None:
    """Training finishes, and no messages are sent, except on closing."""
    cluster = Cluster(2)
    clusters.append(cluster)
    cluster.train()
    assert cluster.stopped == [(STEPS, None)] * 2
    assert cluster.memory.values == {}


def test_waits_for_a_frozen_worker(
    clusters: list[Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers wait even for one that does not answer within the message timeout."""
    monkeypatch.setattr(listeners, "_PATIENCE_S", 0.05)
    cluster = Cluster(2)
    clusters.append(cluster)
    frozen = cluster.stops[1]
    with frozen._lock:  # it cannot answer
        cluster.stops[0].request(cause(0))
        assert cluster.memory.wait_for("keras_distplug/told/session/moment/0")
        assert not cluster.memory.wait_for("keras_distplug/told/session/stop", 0.3)
    assert cluster.memory.wait_for("keras_distplug/told/session/stop")
    cluster.train()
    assert cluster.stopped == [(1, cause(0))] * 2


def test_lost_store(clusters: list[Cluster]) -> None:
    """Without the store, training finishes, and the reason for not stopping is reported."""
    cluster = Cluster(2)
    clusters.append(cluster)
    cluster.memory.breaks_at = "keras_distplug/told/session/stop"
    cluster.stops[0].request(cause(0))
    cluster.train()
    assert cluster.stopped == [(STEPS, None)] * 2
    assert len(cluster.lost) == 2


def test_alone() -> None:
    """A single process stops at the next opportunity, for the first cause."""
    stop = Stop()
    assert stop.is_due() is None
    stop.request(cause(0))
    stop.request(cause(1))
    assert stop.is_due() == cause(0)
