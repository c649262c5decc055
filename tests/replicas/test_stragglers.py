"""Distinguishing stragglers from replicas that are only occasionally slow."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from keras_distplug.replicas.stragglers import Judge, Straggler
from keras_distplug.step.step_reports import ReplicaReport, StepReport

STEP_S = 0.1


def paces(
    compute_s: Sequence[float | Mapping[int, float]],
    input_s: Sequence[float] = (),
    network_s: Sequence[float | None] = (),
) -> list[StepReport]:
    """Returns one window's reports of several workers, with one or more replicas per worker."""
    return [
        StepReport(
            rank,
            f"worker-{rank} on h",
            step=10,
            steps=10,
            step_s=STEP_S,
            replicas=tuple(
                ReplicaReport(replica, compute_s)
                for replica, compute_s in (
                    each if isinstance(each, Mapping) else {rank: each}
                ).items()
            ),
            input_s=input_s[rank] if input_s else None,
            network_s=network_s[rank] if network_s else None,
        )
        for rank, each in enumerate(compute_s)
    ]


def judged(
    *windows: list[StepReport], threshold: float = 0.75, needed: int = 3
) -> list[list[Straggler]]:
    judge = Judge(threshold, needed)
    return [judge.add(each) for each in windows]


FINE = paces([0.05, 0.05, 0.05])
SLOW = paces([0.05, 0.10, 0.05])


def test_slow_in_every_window() -> None:
    """A straggler is reported once, in the decisive window, with that window's times and its own
    past."""
    told = judged(FINE, FINE, *[SLOW] * 5)
    assert [len(each) for each in told] == [0, 0, 0, 0, 1, 0, 0]
    [found] = told[4]
    assert found == Straggler("compute", 1, "worker-1 on h", 1, 0.10, 0.05, 0.05)
    assert found.score == 0.5
    assert str(found) == (
        "replica 1 (worker-1 on h) takes 100 ms per step to compute its gradients, others "
        "take 50 ms; all workers wait for it (it used to take 50 ms)"
    )


def test_slow_from_the_start() -> None:
    told = judged(*[SLOW] * 3)
    assert told[2][0].past_s is None
    assert "used to take" not in str(told[2][0])


def test_recovery() -> None:
    """Recovery takes the same number of windows, after which a straggler may be reported again."""
    told = judged(*[SLOW] * 3, FINE, FINE, SLOW, *[FINE] * 4, *[SLOW] * 3)
    ends = [(number, each.is_over) for number, found in enumerate(told) for each in found]
    assert ends == [(2, False), (8, True), (12, False)]
    assert str(told[8][0]) == (
        "replica 1 (worker-1 on h) no longer takes longer than the others to compute its gradients"
    )


def test_occasionally_slow() -> None:
    assert not any(judged(*[SLOW, SLOW, FINE] * 20))


@pytest.mark.parametrize("seed", range(20))
def test_moving_slowness(seed: int) -> None:
    """Slowness that moves from replica to replica is not reported, although one is always slow."""
    draws = random.Random(seed)
    windows, last = [], -1
    for _ in range(30):
        last = draws.choice([rank for rank in range(3) if rank != last])
        each = [0.12 if rank == last else 0.05 for rank in range(3)]
        windows += [paces(each)] * draws.randint(1, 2)
    assert not any(judged(*windows))


@pytest.mark.parametrize("seed", range(20))
def test_noise(seed: int) -> None:
    """Independent noise of 12 % is not reported."""
    draws = random.Random(seed)
    assert not any(
        judged(*[paces([0.05 * draws.uniform(0.88, 1.12) for _ in range(3)]) for _ in range(200)])
    )


def test_insignificant_slowness() -> None:
    """A replica that takes ten times as long as others, but a hundredth of the step, is ignored."""
    assert not any(judged(*[paces([0.0001, 0.001])] * 9))


def test_two() -> None:
    """Two replicas are compared with each other."""
    told = judged(*[paces([0.09, 0.05])] * 3)
    assert [(each.cause, each.worker) for each in told[2]] == [("compute", 0)]


def test_replicas_of_a_worker() -> None:
    """A straggler may be one of several devices of a machine."""
    told = judged(*[paces([{0: 0.05, 1: 0.05}, {2: 0.05, 3: 0.08}])] * 3)
    assert [(each.worker, each.replica) for each in told[2]] == [(1, 3)]


def test_input() -> None:
    """Waiting for data concerns a worker, and is distinguished from computing."""
    told = judged(*[paces([0.02, 0.02, 0.02], [0.0, 0.0, 0.06])] * 3)
    [found] = told[2]
    assert (found.cause, found.worker, found.replica) == ("input", 2, None)
    assert str(found).startswith(
        "worker-2 on h takes 60 ms per step to get its data, others take 0 ms"
    )


def test_network() -> None:
    """A worker's network is compared with those of the others, except the chief's."""
    told = judged(*[paces([0.02] * 4, network_s=[None, 0.01, 0.01, 0.06])] * 3)
    [found] = told[2]
    assert (found.cause, found.worker, found.replica) == ("network", 3, None)
    assert str(found).startswith(
        "worker-3 on h takes 60 ms per step to send its gradients to the chief and back, "
        "others take 10 ms; all workers wait for it"
    )


def test_stale_network_measurements() -> None:
    """A measurement counts only once, even if it is the newest in several windows."""
    new = paces([0.02] * 3, network_s=[None, 0.01, 0.06])
    old = [replace(each, is_network_new=False) for each in new]
    told = judged(new, *[old] * 9, new, *[old] * 9, new)
    assert [number for number, each in enumerate(told) if each] == [20]


def test_network_of_the_only_other_worker() -> None:
    """It is compared with its own past, if there is one."""
    fine, slow = (paces([0.02] * 2, network_s=[None, s]) for s in (0.01, 0.06))
    assert not any(judged(*[slow] * 9))
    told = judged(fine, fine, *[slow] * 4, *[fine] * 3)
    assert [len(each) for each in told] == [0, 0, 0, 0, 1, 0, 0, 0, 1]
    [found] = told[4]
    assert (found.cause, found.worker, found.others_s, found.past_s) == ("network", 1, None, 0.01)
    assert str(found) == (
        "worker-1 on h takes 60 ms per step to send its gradients to the chief and back; all "
        "workers wait for it (it used to take 10 ms)"
    )


def test_two_causes() -> None:
    told = judged(*[paces([0.02, 0.02, 0.05], [0.05, 0.0, 0.0])] * 3)
    assert {(each.cause, each.worker) for each in told[2]} == {("compute", 2), ("input", 0)}


def test_single_replica() -> None:
    """A single replica cannot be compared; the devices of one process share one input."""
    assert not any(judged(*[paces([0.05], [0.05])] * 5))
    assert not any(judged(*[paces([{0: 0.05, 1: 0.05}], [0.05])] * 5))
