"""Faults of all kinds, drawn at random, on several workers whose checkpoints are in a store behind
a proxy that does harm, too; and what came of them."""

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
# Behind harm to checkpoints, new ones have to be made before the next such harm: there are two.
APART = 4 * SAVE_FREQ
STORM_SECS, STORM_RATE = 5.0, 0.3
_GIVEN_UP_SECS = 10.0  # a save that fails is tried again, and told when that has failed, too

# How often each kind is drawn, by its weight.
WEIGHTS = {
    "kill": 6,
    "crash": 2,
    "abort": 1,
    "error": 2,
    "vanish": 2,
    "leave": 1,
    "tell": 4,
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
    """So many faults, in the order in which they come, and behind them the NaN in the data, which
    wait for nothing."""
    draw = random.Random(seed)
    found: list[Fault] = []
    step = SAVE_FREQ
    while len(found) < count:
        step += draw.randint(3, 12)
        each, step = _one(draw, workers, step)
        found.append(each)
        # In one of four recoveries a worker dies once more.
        if harmed.KINDS[each.kind].restarts and draw.random() < 0.25:
            found.append(fault.kill(draw.randrange(workers), moment="begin"))
    batches = range(3 * SAVE_FREQ, step, 2 * BATCHES)
    return found + [
        fault.nan(draw.randrange(workers), first + draw.randrange(BATCHES)) for first in batches
    ]


def _one(draw: random.Random, workers: int, step: int) -> tuple[Fault, int]:
    """A fault behind `step`, or a little later, and behind which step the next one may come."""
    [kind] = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))
    worker = draw.randrange(workers)
    if kind in DEATHS:
        moment = draw.choice(["step", "step", "saving", "validation", "epoch"])
        if moment in ("validation", "epoch"):
            step += -(step + 1) % BATCHES  # the last one of its epoch
        return DEATHS[kind](worker, step, moment), step + SAVE_FREQ * (moment == "saving")
    if kind == "tell":
        told = draw.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
        return fault.tell(told, worker, step), step
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
    """A soak, and a training with the same data that nobody disturbed.

    Args:
        ended: The job that was done harm to.
        differences: What of its outcome, on any worker, is not the same to the bit.
        requests_harmed: By the proxy.
        wall_secs: Of the job.
        goodput: The share of its time in which it trained what had not been trained before.
        epochs: It trained.
        secs: By `Category`.
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
    told: Callable[[str], None] = lambda line: None,
) -> Soaked:
    """Runs both.

    Args:
        folder: An empty one.
        seed: Of the faults.
        workers: How many.
        secs: For how long faults come; the job ends some time behind that.
        store_port: Of the store, on this machine.
        directory: In it.
        storage_options: Of it, by the port at which it is reached.
        told: Hears of each fault as it comes.
    """
    set_up = SetUp(f"{workers} workers", workers)
    faults = drawn(seed, workers, count=int(secs))
    job = Job(
        set_up, directory, epochs=100_000, batches=BATCHES, global_batch=12, save_freq=SAVE_FREQ
    )
    begun_s = time.monotonic()
    with in_front_of(store_port) as proxy:
        harming = folder / "harmed"
        harming.mkdir()
        job = replace(job, storage_options=storage_options(proxy.port))
        with _conducted(harming, faults, proxy, secs, told):
            ended = harmed.run(harming, job, faults, timeout_s=2 * secs + 900)
        wall_secs = time.monotonic() - begun_s
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
    """Faults that came, and of which nothing was said, or not what should be."""
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
    told: Callable[[str], None],
) -> Iterator[None]:
    """Meanwhile, the store is harmed where a fault says so, and in the end it is enough."""
    over = threading.Event()

    def conduct() -> None:
        end_s = time.monotonic() + secs
        calm_s = 0.0
        seen = 0
        while not over.wait(0.1):
            came = fault.fired(folder)
            for each in came[seen:]:
                of = faults[each.index]
                told(f"{each.who}: {of}")
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
    """So many requests fail, in one way or another."""
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
