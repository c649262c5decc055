"""The faults that a job of every setup meets, and their expected outcomes."""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable, Iterator, Sequence

from support import fault
from support.fault import Fault
from support.harmed import KINDS, Job, Result, SetUp

MIRRORED = SetUp("two mirrored replicas", replicas=2)
TWO_WORKERS = SetUp("2 workers", workers=2)
THREE_WORKERS = SetUp("3 workers", workers=3)
SERVERS = SetUp("parameter server, 2 workers", workers=2, servers=1)

DATA_STEP = 33


def deaths(last: int) -> list[Fault]:
    """Deaths of the chief and the last worker: in a step, save, validation and restore."""
    return [
        fault.kill(0, 5),
        fault.crash(last, 9),
        fault.kill(last, 14, "saving"),
        fault.abort(0, 20),
        fault.error(last, moment="begin"),
        fault.vanish(0, 26, "validation"),
        fault.leave(last, 39),
        *data(last),
    ]


def hangs(last: int) -> list[Fault]:
    """Hangs, and a slow step that is not a hang."""
    return [
        fault.stop(last, 5),
        fault.lock(0, 9),
        fault.starve(last, 14),
        fault.slow(4, last, 17),
        *([fault.stray(0, 20)] if last else []),
        *data(last),
    ]


def storage_and_notices(last: int) -> list[Fault]:
    """A full disk, damage to the newest checkpoint, and preemptions."""
    return [
        fault.fails_to_write(last, 5, saves=2),
        fault.truncate(0, 22),
        fault.flip(last, 31),
        fault.preempt(signal.SIGTERM, last, 35),
        fault.preempt(signal.SIGUSR1, 0, 40, "saving"),
        *data(last),
    ]


def servers(last: int) -> list[Fault]:
    """Only a worker is restarted on its own; without a parameter server or the chief, all are."""
    return [
        fault.kill(last, 5),
        fault.kill("ps-0", 15),
        fault.kill("chief-0", 27),
        fault.fails_to_write("chief-0", 31, saves=1, number=errno.EACCES),
        fault.preempt(signal.SIGTERM, "chief-0", 45),
        fault.truncate("chief-0", 60),
    ]


def data(last: int) -> list[Fault]:
    """Faults of the data, which an uninterrupted run meets as well."""
    return [fault.nan(last, DATA_STEP)]


Faults = Callable[[int], list[Fault]]
ALL: list[tuple[SetUp, Faults]] = [
    *((MIRRORED, each) for each in (deaths, hangs, storage_and_notices)),
    *((TWO_WORKERS, each) for each in (deaths, hangs, storage_and_notices)),
    *((THREE_WORKERS, each) for each in (deaths, hangs, storage_and_notices)),
    (SERVERS, servers),
]


def epochs(set_up: SetUp) -> int:
    return 6 if set_up.servers else 4


def wrong(results: Sequence[Result], job: Job) -> Iterator[str]:
    """Returns the faults with an unexpected outcome."""
    for each in results:
        of = each.fault
        if not each.came:
            yield f"{of}: did not come"
        elif not each.is_named:
            yield f"{of}: said to be {each.cause!r}"
        # A save may be running: the newest committed checkpoint is then the previous one.
        at_most = 0 if of.kind == "preempt" else 2 * job.save_freq
        if of.kind in ("truncate", "flip"):
            at_most += job.save_freq
        if KINDS[of.kind].restarts and (each.steps_lost or 0) > at_most:
            yield f"{of}: {each.steps_lost} steps were lost, expected {at_most} at most"
