"""The log of an imaginary run of several workers: two attempts, a slow replica, a kill."""

from __future__ import annotations

from keras_distplug.core import events
from keras_distplug.core.events import SUPERVISOR, Entry, Event, ReplicaTimes
from keras_distplug.runlog.goodput_totals import Fit

SLOW = 2
BEGIN = 1795461600.0
JOB = "8d1e"


def fits(workers: int, windows: int, window_s: float = 1.0) -> tuple[list[Fit], list[Entry], float]:
    """Returns the events of the workers and the supervisor, and the time of the end.

    Every worker has two attempts of `windows` windows of 10 steps. The second one starts 5 s after
    the end of the first one, with the checkpoint of 50 steps before.
    """
    found, last_step = [], 10 * windows
    first_end = BEGIN + 10 + windows * window_s
    end = first_end + 5 + 10 + windows * window_s
    supervised = [
        _entry(BEGIN, events.Started(tuple(f"worker-{n}" for n in range(workers)), ()), 0),
        _entry(first_end + 1, events.Failed("worker-1", "FAILED", 137, "worker-1 was killed"), 0),
        _entry(end + 2, events.Ended(0, ""), 1),
    ]
    for rank in range(workers):
        found.append(_fit(workers, rank, windows, window_s, BEGIN, 0, 0))
        found.append(_fit(workers, rank, windows, window_s, first_end + 5, last_step - 50, 1))
    return found, supervised, end + 2


def _fit(
    workers: int,
    rank: int,
    windows: int,
    window_s: float,
    begin: float,
    first_step: int,
    attempt: int,
) -> Fit:
    source = f"worker-{rank}"

    def entry(at: float, event: Event) -> Entry:
        return Entry(at, source, event, JOB, attempt)

    session = f"session-{attempt}"
    began = events.Began(
        *(session, rank, workers, workers, f"node-{rank}", 1, "Strategy", 9, first_step),
        reached_before=first_step + 50
        if attempt == 1 and rank == 0
        else None,  # as under a supervisor
    )
    compute_s = 0.14 if rank == SLOW else 0.07
    entries = [entry(begin + 10, began)]
    for number in range(windows):
        at, step = begin + 10 + (number + 1) * window_s, first_step + 10 * (number + 1)
        secs = {"step": 0.8 * window_s, "input": 0.1 * window_s, "other": 0.1 * window_s}
        if number == 0:
            secs["start_up"] = 10.0
        replica = ReplicaTimes(rank, compute_s, 0.01)
        entries.append(entry(at, events.Window(step, 10, 0, secs, 0.1, 0.01, 10**9, (replica,))))
        if rank == 0 and (number + 1) % (windows // 2) == 0:
            entries.append(entry(at, events.Saved(step, 0.4, False, 0.012, 123_456_789)))
    if attempt == 1:
        step = first_step + 10 * windows
        if rank == 0:
            entries += [
                entry(
                    entries[-1].at,
                    events.UpdateLeftOut(
                        0, 17, 1, (1,), ("worker-1",), "dense/kernel", None, False, None, "a NaN"
                    ),
                ),
                entry(
                    entries[-1].at,
                    events.SlowReplica(
                        "compute", SLOW, "worker-2", 0.14, SLOW, 0.07, False, "slow"
                    ),
                ),
            ]
        entries.append(entry(entries[-1].at, events.Finished(step, 9, False)))
    return Fit(began, tuple(entries))


def _entry(at: float, event: Event, attempt: int) -> Entry:
    return Entry(at, SUPERVISOR, event, JOB, attempt)
