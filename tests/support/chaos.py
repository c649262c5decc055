"""Random faults of all kinds on several workers, and their outcomes.

The checkpoints are in a store behind a proxy that causes faults, too.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stores.flaky import Proxy, Rule, in_front_of
from support import fault, harmed
from support.fault import Fault
from support.harmed import Ended, Job, Result, SetUp

from keras_distplug.runlog import goodput_totals

BATCHES, SAVE_FREQ = 20, 5
# After damage to checkpoints, new ones must be written before the next such fault: there are two.
APART = 4 * SAVE_FREQ
STORM_SECS, STORM_RATE = 5.0, 0.3
_GIVEN_UP_SECS = 10.0  # a failed save is retried, and reported if that fails as well

# The relative frequency of every kind.
WEIGHTS = {
    "kill": 6,
    "crash": 2,
    "abort": 1,
    "error": 2,
    "vanish": 2,
    "leave": 1,
    "preempt": 4,
    "stop": 2,
    "lock": 1,
    "starve": 2,
    "stray": 1,
    "slow": 2,
    "fails_to_write": 2,
    "truncate": 2,
    "flip": 2,
    "flaky_store": 4,
}
DEATHS: dict[str, Callable[..., Fault]] = {
    "kill": fault.kill,
    "crash": fault.crash,
    "error": fault.error,
    "vanish": fault.vanish,
}
OTHERS: dict[str, Callable[..., Fault]] = {
    "abort": fault.abort,
    "leave": fault.leave,
    "stop": fault.stop,
    "lock": fault.lock,
    "starve": fault.starve,
    "stray": fault.stray,
    "truncate": fault.truncate,
    "flip": fault.flip,
}


def drawn(seed: int, workers: int, count: int) -> list[Fault]:
    """Draws faults in the order in which they occur, followed by independent NaN in the data."""
    draw = random.Random(seed)
    found: list[Fault] = []
    step = SAVE_FREQ
    while len(found) < count:
        step += draw.randint(3, 12)
        each, step = _one(draw, workers, step)
        found.append(each)
        # In one of four recoveries, a worker dies again.
        if harmed.KINDS[each.kind].restarts and draw.random() < 0.25:
            found.append(fault.kill(draw.randrange(workers), moment="begin"))
    batches = range(3 * SAVE_FREQ, step, 2 * BATCHES)
    return found + [
        fault.nan(draw.randrange(workers), first + draw.randrange(BATCHES)) for first in batches
    ]


def _one(draw: random.Random, workers: int, step: int) -> tuple[Fault, int]:
    """Returns a fault at `step` or a little later, and the step after which the next may occur."""
    [kind] = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))
    worker = draw.randrange(workers)
    if kind in DEATHS:
        moment = draw.choice(["step", "step", "saving", "validation", "epoch"])
        if moment in ("validation", "epoch"):
            step += -(step + 1) % BATCHES  # the last one of its epoch
        return DEATHS[kind](worker, step, moment), step + SAVE_FREQ * (moment == "saving")
    if kind == "preempt":
        number = draw.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
        return fault.preempt(number, worker, step), step
    if kind == "slow":
        return fault.slow(3.0, worker, step), step
    if kind == "flaky_store":
        return fault.flaky_store(STORM_RATE, STORM_SECS, step), step
    if kind == "fails_to_write":
        saves = draw.choice([1, 2])
        return fault.fails_to_write(worker, step, saves), step + (saves + 2) * SAVE_FREQ
    apart = APART if kind in ("truncate", "flip") else 0
    return OTHERS[kind](worker, step + apart), step + 2 * apart


@dataclass(frozen=True)
class Soaked:
    """A soak test, and an uninterrupted training with the same data.

    Args:
        ended: The job with faults.
        differences: Parts of its outcome, on any worker, that are not bit-identical.
        requests_harmed: Number of requests that the proxy disturbed.
        wall_secs: Duration of the job in seconds.
        goodput: Share of its time spent on training batches for the first time.
        epochs: Number of epochs trained.
        secs: Seconds by `Category`.
    """

    ended: Ended
    differences: list[str]
    requests_harmed: int
    wall_secs: float
    goodput: float
    epochs: int
    secs: Mapping[str, float]


def soak(
    folder: Path,
    *,
    seed: int,
    workers: int,
    secs: float,
    store_port: int,
    directory: str,
    storage_options: Callable[[int], Mapping[str, Any]],
    on_fault: Callable[[str], None] = lambda line: None,
) -> Soaked:
    """Runs both trainings.

    Args:
        folder: An empty folder.
        seed: Seed of the faults.
        workers: Number of workers.
        secs: Duration of the faults; the job ends some time later.
        store_port: Local port of the store.
        directory: Directory in the store.
        storage_options: Function that returns the options of the store for a port.
        on_fault: Function called with every fault when it occurs.
    """
    set_up = SetUp(f"{workers} workers", workers)
    faults = drawn(seed, workers, count=int(secs))
    job = Job(
        set_up, directory, epochs=100_000, batches=BATCHES, global_batch=12, save_freq=SAVE_FREQ
    )
    started_s = time.monotonic()
    with in_front_of(store_port) as proxy:
        harming = folder / "harmed"
        harming.mkdir()
        job = replace(job, storage_options=storage_options(proxy.port))
        with _conducted(harming, faults, proxy, secs, on_fault):
            ended = harmed.run(harming, job, faults, timeout_s=2 * secs + 900)
        wall_secs = time.monotonic() - started_s
    undisturbed = folder / "undisturbed"
    undisturbed.mkdir()
    last = (harming / "last_epoch").read_text()
    (undisturbed / "last_epoch").write_text(last)
    of_data = [each for each in faults if each.moment == "data"]
    here = replace(job, directory=str(undisturbed / "runs"), storage_options=None)
    expected = harmed.run(undisturbed, here, of_data, timeout_s=secs + 900)
    differences = [
        f"worker-{worker}: {name}"
        for worker, outcome in enumerate(ended.outcomes)
        for name in harmed.differences(outcome, expected.outcomes[0])
    ]
    spans = goodput_totals.spans(goodput_totals.chiefs(ended.fits), ended.supervised)
    totals = goodput_totals.totals(spans)
    return Soaked(
        ended,
        differences,
        proxy.harmed,
        wall_secs,
        goodput_totals.goodput(totals) or 0.0,
        int(last) + 1,
        {category.value: value for category, value in totals.items()},
    )


def unnamed(soaked: Soaked) -> Iterator[str]:
    """Returns faults that occurred without a report, or with a wrong one."""
    for each in soaked.ended.results:
        if each.came and _is_to_name(each) and not each.is_named:
            yield f"{each.fault}: {each.cause}"


def _is_to_name(each: Result) -> bool:
    if each.fault.kind == "fails_to_write" and each.next_secs is not None:
        return each.next_secs > _GIVEN_UP_SECS
    return each.fault.kind != "flaky_store"


@contextmanager
def _conducted(
    folder: Path,
    faults: Sequence[Fault],
    proxy: Proxy,
    secs: float,
    on_fault: Callable[[str], None],
) -> Iterator[None]:
    """Disturbs the store when a fault requires it, and finally ends the training."""
    over = threading.Event()

    def conduct() -> None:
        end_s = time.monotonic() + secs
        calm_s = 0.0
        seen = 0
        while not over.wait(0.1):
            came = fault.fired(folder)
            for each in came[seen:]:
                of = faults[each.index]
                on_fault(f"{each.who}: {of}")
                if of.kind == "flaky_store":
                    _storm(proxy, of.rate)
                    calm_s = time.monotonic() + of.secs
            seen = len(came)
            if calm_s and time.monotonic() > calm_s:
                proxy.mend()
                calm_s = 0.0
            if time.monotonic() > end_s:
                (folder / "enough").touch()

    thread = threading.Thread(target=conduct, name="chaos", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=30)


def _storm(proxy: Proxy, rate: float) -> None:
    """Makes a number of requests fail in various ways."""
    proxy.mend()
    ways = [
        Rule("status"),
        Rule("status", code=500),
        Rule("status", code=429),
        Rule("reset_request", "PUT", after_bytes=100),
        Rule("reset_reply", "GET", after_bytes=100),
        Rule("lost_reply"),
        Rule("stall"),
    ]
    for way in ways:
        proxy.harm(replace(way, rate=rate / len(ways)))
