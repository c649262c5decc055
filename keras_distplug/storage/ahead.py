"""Jobs that run ahead of who needs their results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_order(jobs: Iterable[Callable[[], T]], threads: int) -> Iterator[T]:
    """What each of `jobs` returns, in their order, run by several threads.

    At most two jobs a thread are taken from `jobs` before their results are. Nothing runs any more
    once this has ended, be it early.

    Args:
        jobs: What to run.
        threads: How many; with 1 each job runs here when its result is asked for.
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
