"""Jobs that run in threads, ahead of the consumer of their results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def bounded_parallel_map(jobs: Iterable[Callable[[], T]], threads: int) -> Iterator[T]:
    """Runs `jobs` in several threads and yields their results in order.

    At most two jobs per thread run ahead of the consumer. When this generator finishes or is
    closed early, no job is running any more.

    Args:
        jobs: The functions to call.
        threads: The number of threads. With 1, every job runs in the calling thread when its
            result is requested.
    """
    if threads == 1:
        for job in jobs:
            yield job()
        return
    running: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(threads, "keras_distplug-ahead")
    try:
        for job in jobs:
            running.append(pool.submit(job))
            if len(running) == 2 * threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
