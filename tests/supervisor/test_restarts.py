"""Decisions to restart a job, and to give it up."""

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
LOST_PEER = exit_of(0, Cause.FAILED, 201)
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
    ids=[
        "done",
        "died",
        "died during a preemption",
        "Ctrl-C",
        "never again",
        "never again, after a death",
    ],
)
def test_end(exits: list[Exit], code: int) -> None:
    """Without restarts left, a failure ends the job; Ctrl-C and exit code 93 always end it."""
    for failures in (0, 9):
        found = decide([attempt(*exits)], Budgets(failures=failures))
        if failures == 0 or code in (0, 93, 130):
            assert isinstance(found, End)
            assert found.code == code
        else:
            assert found == Again(ALL)


def test_budgets() -> None:
    """Failures and preemptions have separate limits."""
    budgets = Budgets(failures=2, preemptions=3, without_progress=99)
    preempted = [attempt(WENT, WENT, WENT)] * 3
    assert decide(preempted, budgets) == Again(ALL, was_preempted=True)
    assert decide([*preempted, *preempted[:1]], budgets) == End(
        143, "preempted 4 times (--max-preemptions)"
    )
    failed = [attempt(DEAD, PEER)] * 2
    assert isinstance(decide([*preempted, *failed], budgets), Again)
    assert decide([*failed, *preempted, *failed[:1]], budgets) == End(
        137, "gave up after 2 restarts"
    )


def test_no_progress() -> None:
    """Three consecutive failed attempts without a newer checkpoint end the job with 93.

    The last attempt is delayed. Saving the same step again does not count.
    """
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


def test_preemptions_without_progress() -> None:
    """Preempted attempts neither count nor interrupt the count."""
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
    """If a worker fails twice in succession, the others continue without it.

    This is limited by the minimum number of workers; the limit on attempts then starts again.
    """
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


@pytest.mark.parametrize(
    ("exits", "given_up"),
    [
        ([LOST_PEER, exit_of(1, Cause.STOPPED, -9)], 1),
        ([LOST_PEER, exit_of(1, Cause.STOPPED, -9), exit_of(2, Cause.STOPPED, -15)], None),
        ([LOST_PEER, exit_of(1, Cause.FAILED, 201), exit_of(2, Cause.FAILED, 201)], None),
    ],
    ids=["one slow exit", "two candidates", "no candidate"],
)
def test_slow_exit_of_the_cause(exits: list[Exit], given_up: int | None) -> None:
    """A worker that left because it lost another one is never the one that is given up."""
    last = [attempt(*exits, slots=ALL[: len(exits)])] * 2
    found = decide(last, Budgets(failures=9, min_workers=1))
    assert isinstance(found, Again)
    assert found.given_up == given_up


def test_interrupted() -> None:
    """A signal to the supervisor ends the job."""
    outcome = Outcome((PEER,), signal.SIGTERM, 101.0)
    found = decide([Attempt(ALL, outcome, {})], Budgets())
    assert found == End(143, "stopped by SIGTERM to the supervisor")


@pytest.mark.parametrize(
    ("name", "value"),
    [("failures", -1), ("preemptions", -1), ("without_progress", 0), ("min_workers", 0)],
)
def test_impossible_budgets(name: str, value: int) -> None:
    """An impossible limit is refused."""
    with pytest.raises(ConfigurationError, match=f"must be >= .*Received: {value}"):
        Budgets(**{name: value})
