"""Restarts of single workers, their limits, and workers that do not join in time."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from keras_distplug.core.supervised import Phase, Supervised
from keras_distplug.supervisor.joining import Joining
from keras_distplug.supervisor.launch import local_cluster
from keras_distplug.supervisor.members import Members
from keras_distplug.supervisor.replacing import Death, GiveUp, decide


def death(
    worker: int = 0, *, has_joined: bool = False, was_killed: bool = False, **saves: int
) -> Death:
    return Death(f"worker-{worker}", has_joined, was_killed, saves)


SERVED = death(has_joined=True)
STILLBORN = death()
KILLED = death(was_killed=True)
OTHER = death(1)
GROUP = Members.of(local_cluster(range(4), ps=1))


def test_members() -> None:
    """With parameter servers, only the chief trains, and workers are replaceable."""
    assert GROUP.names == ("chief-0", "worker-0", "worker-1", "ps-0")
    assert GROUP.trainers == ("chief-0",)
    assert GROUP.replaceable == ("worker-0", "worker-1")
    together = Members.of(local_cluster(range(2)))
    assert together.trainers == together.names == ("worker-0", "worker-1")
    assert together.servers == together.replaceable == ()


def test_pauses() -> None:
    """The pause doubles with a worker's exits before joining.

    A worker that had joined is restarted immediately.
    """
    found = [decide([STILLBORN] * count, 99) for count in range(1, 10)]
    assert found == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert decide([SERVED] * 50, 99) == 0.0
    assert decide([STILLBORN] * 5 + [SERVED], 99) == 0.0
    assert decide([STILLBORN, OTHER] * 2, 99) == 1.0
    assert decide([KILLED] * 50, 99) == 0.0
    assert decide([STILLBORN, KILLED, STILLBORN], 99) == 1.0
    assert decide([STILLBORN, STILLBORN, KILLED], 99) == 0.0


def test_never_joined() -> None:
    """After ten consecutive exits before joining, the job is given up with 93."""
    assert decide([STILLBORN] * 10, 99) == GiveUp(
        "gave up: worker-0 exited 10 consecutive times before joining the cluster", 93
    )
    assert isinstance(decide([STILLBORN, OTHER] * 9, 99), float)
    assert isinstance(decide([STILLBORN] * 9 + [SERVED] + [STILLBORN], 99), float)


@pytest.mark.parametrize(("budget", "often"), [(0, "0 times"), (1, "once"), (3, "3 times")])
def test_budget(budget: int, often: str) -> None:
    """All workers share one limit; the exit code is that of the last one."""
    deaths = [SERVED, death(1, has_joined=True)] * 2
    assert decide(deaths[: budget + 1], budget) == GiveUp(
        f"gave up: workers were restarted {often} without a newer checkpoint "
        "(--max-worker-restarts)"
    )
    assert all(decide(deaths[:count], budget) == 0.0 for count in range(1, budget + 1))


def test_progress() -> None:
    """Only a newer checkpoint resets the counts."""

    assert decide([death(a=10)] * 4, 9) == 4.0
    assert decide([*[death(a=10)] * 4, death(a=11)], 3) == 0.0
    assert decide([*[death(a=10)] * 4, death(b=1)], 3) == 0.0
    assert isinstance(decide([*[death(a=10)] * 3, death(a=10)], 3), GiveUp)
    assert decide([STILLBORN, STILLBORN, death(a=1)], 9) == 0.0, "newer than none"
    forever = [death(a=step // 3) for step in range(300)]
    assert all(isinstance(decide(forever[:end], 3), float) for end in range(1, 300))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def contract(tmp_path: Path) -> Supervised:
    return Supervised("job", 0, tmp_path)


def test_late_workers(contract: Supervised) -> None:
    """Workers that train together share one time limit; every late worker is reported once."""
    clock = Clock()
    joining = Joining(contract, Members(("worker-0", "worker-1")), 3.0, clock)
    assert joining.due == 103.0
    contract.report("worker-0", Phase.JOINED)
    clock.now = 102.9
    assert joining.late() == []
    clock.now = 103.0
    assert joining.late() == ["worker-1"]
    assert joining.late() == []
    assert joining.due == inf


def test_single_worker(contract: Supervised) -> None:
    """A single worker has no cluster to join."""
    clock = Clock()
    joining = Joining(contract, Members(("worker-0",)), 3.0, clock)
    clock.now = 999.0
    assert joining.late() == []


def test_chief_joins_last(contract: Supervised) -> None:
    """A chief's time starts when all of its servers have joined, so it is not blamed for them."""
    clock = Clock()
    joining = Joining(contract, GROUP, 3.0, clock)
    contract.report("ps-0", Phase.JOINED)
    contract.report("worker-0", Phase.JOINED)
    clock.now = 103.5
    assert joining.late() == ["worker-1"]
    joining.await_start("worker-1")
    clock.now = 200.0
    assert joining.late() == []
    joining.expect("worker-1")
    assert joining.due == 203.0
    clock.now = 202.0
    assert joining.late() == []
    contract.report("worker-1", Phase.JOINED)
    assert joining.late() == []
    assert joining.due == 205.0, "three seconds after it was last found missing"
    clock.now = 205.0
    assert joining.late() == ["chief-0"]
