"""When a job is started again, and when it is given up."""

from __future__ import annotations

import signal
from collections.abc import Mapping

import pytest

from keras_distplug.core.errors import ConfigurationError
from keras_distplug.supervisor.attempt import Outcome
from keras_distplug.supervisor.exits import Cause, Exit
from keras_distplug.supervisor.restarts import Again, Attempt, Budgets, End, decide

ALL = (0, 1, 2)


def exit_of(worker: int, cause: Cause, code: int) -> Exit:
    return Exit(f"worker-{worker}", cause, code, 100.0 + abs(code) / 1e4)


DEAD = exit_of(1, Cause.FAILED, -9)
OTHER_DEAD = exit_of(0, Cause.FAILED, 3)
PEER = exit_of(0, Cause.STOPPED, -15)
WENT = exit_of(0, Cause.PREEMPTED, 143)
NEVER = exit_of(1, Cause.FAILED, 93)
CTRL_C = exit_of(1, Cause.FAILED, -2)
DONE = exit_of(0, Cause.COMPLETED, 0)


def attempt(
    *exits: Exit, saves: Mapping[str, int] | None = None, slots: tuple[int, ...] = ALL
) -> Attempt:
    return Attempt(slots, Outcome(exits, None, 102.0), saves or {})


@pytest.mark.parametrize(
    ("exits", "code"),
    [
        ([DONE], 0),
        ([DEAD, PEER], 137),
        ([WENT, DEAD], 137),
        ([WENT, CTRL_C], 130),
        ([WENT, NEVER], 93),
        ([DEAD, exit_of(0, Cause.STOPPED, 93)], 93),
    ],
    ids=["done", "died", "died beside one told", "ctrl-C", "never again", "never, behind a death"],
)
def test_end(exits: list[Exit], code: int) -> None:
    """Without a budget a failure is the end; the user's ctrl-C, and who asks not to be started
    again, are the end with any."""
    for failures in (0, 9):
        found = decide([attempt(*exits)], Budgets(failures=failures))
        if failures == 0 or code in (0, 93, 130):
            assert isinstance(found, End)
            assert found.code == code
        else:
            assert found == Again(ALL)


def test_budgets() -> None:
    """Failures and notices to go have budgets of their own, and neither uses up the other."""
    budgets = Budgets(failures=2, preemptions=3, without_progress=99)
    told = [attempt(WENT, WENT, WENT)] * 3
    assert decide(told, budgets) == Again(ALL, was_preempted=True)
    assert decide([*told, *told[:1]], budgets) == End(143, "preempted 4 times (--max-preemptions)")
    failed = [attempt(DEAD, PEER)] * 2
    assert isinstance(decide([*told, *failed], budgets), Again)
    assert decide([*failed, *told, *failed[:1]], budgets) == End(137, "gave up after 2 restarts")


def test_no_progress() -> None:
    """Three failed attempts in a row without a newer checkpoint are the end, with 93, and the last
    of them comes behind a pause. A checkpoint at the same step again is none."""
    history = [attempt(DEAD, saves={"run-1": 20})]
    assert decide(history, Budgets()) == Again(ALL)
    history.append(attempt(OTHER_DEAD))
    assert decide(history, Budgets()) == Again(ALL)
    history.append(attempt(DEAD, saves={"run-1": 20}))
    assert decide(history, Budgets()) == Again(ALL, pause_secs=1.0)
    history.append(attempt(OTHER_DEAD))
    assert decide(history, Budgets()) == End(
        93, "gave up: 3 consecutive attempts without a newer checkpoint (--max-without-progress)"
    )
    newer = attempt(DEAD, saves={"run-1": 22})
    assert decide([*history[:-1], newer], Budgets()) == Again(ALL)
    other_run = attempt(DEAD, saves={"run-2": 1})
    assert decide([*history[:-1], other_run], Budgets()) == Again(ALL)


def test_notices_to_go_are_no_standstill() -> None:
    """Attempts whose workers were told to go neither count nor break the count."""
    history = [attempt(DEAD), *[attempt(WENT)] * 5, attempt(DEAD), attempt(WENT), attempt(DEAD)]
    assert decide(history[:-1], Budgets()) == Again(ALL, was_preempted=True)
    found = decide(history, Budgets())
    assert isinstance(found, End)
    assert found.code == 93


def test_pauses() -> None:
    """The pause doubles, up to a minute."""
    budgets = Budgets(failures=99, without_progress=99)
    found = [decide([attempt(DEAD)] * count, budgets) for count in range(1, 10)]
    assert [each.pause_secs for each in found if isinstance(each, Again)] == [
        *(0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0)
    ]


def test_fewer_workers() -> None:
    """Where one worker fails twice in a row, the others go on without it, down to the least
    number; they then have as many attempts as all had."""
    budgets = Budgets(min_workers=2)
    history = [attempt(DEAD), attempt(DEAD)]
    assert decide(history[:1], budgets) == Again(ALL)
    assert decide([attempt(DEAD), attempt(OTHER_DEAD)], budgets) == Again(ALL, pause_secs=1.0)
    assert decide(history, budgets) == Again((0, 2), given_up=1)
    assert decide(history, Budgets()) == Again(ALL, pause_secs=1.0)
    history.append(attempt(DEAD, slots=(0, 2)))
    assert decide(history, budgets) == Again((0, 2))
    history.append(attempt(DEAD, slots=(0, 2)))
    assert decide(history, budgets) == Again((0, 2), pause_secs=1.0)
    least = Budgets(min_workers=1)
    assert decide(history, least) == Again((0,), given_up=2)
    history.append(attempt(DEAD, slots=(0, 2)))
    found = decide(history, budgets)
    assert isinstance(found, End)
    assert found.code == 93


def test_interrupted() -> None:
    """A signal to the supervisor is the end."""
    outcome = Outcome((PEER,), signal.SIGTERM, 101.0)
    found = decide([Attempt(ALL, outcome, {})], Budgets())
    assert found == End(143, "stopped by SIGTERM to the supervisor")


@pytest.mark.parametrize(
    ("name", "value"),
    [("failures", -1), ("preemptions", -1), ("without_progress", 0), ("min_workers", 0)],
)
def test_impossible_budgets(name: str, value: int) -> None:
    """A budget that cannot be is refused."""
    with pytest.raises(ConfigurationError, match=f"must be >= .*Received: {value}"):
        Budgets(**{name: value})
