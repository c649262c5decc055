"""Jobs that run ahead of the consumer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from keras_distplug.storage.parallel import bounded_parallel_map

WAIT_S = 60


def jobs_of(taken: list[int], count: int) -> Iterator[Callable[[], int]]:
    for number in range(count):
        taken.append(number)
        yield lambda number=number: number


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 3, 50])
def test_order(threads: int, count: int) -> None:
    """Results have the order of the jobs, and jobs are consumed only as needed."""
    taken: list[int] = []
    for number, result in enumerate(bounded_parallel_map(jobs_of(taken, count), threads)):
        assert result == number
        assert len(taken) <= number + (1 if threads == 1 else 2 * threads)
    assert taken == list(range(count))


def test_concurrent_jobs() -> None:
    """Every thread runs a job concurrently, whichever finishes first."""
    threads = 3
    all_here = threading.Barrier(threads)
    last_first = [threading.Event() for _ in range(threads)]

    def job(number: int) -> int:
        all_here.wait(WAIT_S)
        if number + 1 < threads:
            assert last_first[number + 1].wait(WAIT_S)
        last_first[number].set()
        return number

    jobs = (lambda number=number: job(number) for number in range(threads))
    assert list(bounded_parallel_map(jobs, threads)) == [0, 1, 2]


@pytest.mark.parametrize("threads", [1, 2])
def test_failure(threads: int) -> None:
    """A failure is raised at its position, and no job after it is consumed."""

    def fail() -> int:
        raise OSError("no")

    jobs: list[Callable[[], int]] = [lambda: 0, lambda: 1, fail, lambda: 3]
    results = bounded_parallel_map(jobs, threads)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(OSError, match="no"):
        next(results)
    assert list(results) == []


def test_nothing_runs_after_the_end() -> None:
    """A consumer that stops early can free the memory that the jobs write to."""
    go, running, ended = threading.Event(), threading.Event(), []

    def slow() -> int:
        running.set()
        assert go.wait(WAIT_S)
        ended.append("slow")
        return 1

    results = bounded_parallel_map(iter([lambda: 0, slow, slow, slow]), 2)
    assert next(results) == 0
    assert running.wait(WAIT_S)
    threading.Timer(0.05, go.set).start()
    results.close()
    assert 1 <= len(ended) <= 2
    assert not [each for each in threading.enumerate() if "keras_distplug-ahead" in each.name]
