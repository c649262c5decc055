"""Every second of a run is counted in exactly one category, whatever happens to the run."""

from __future__ import annotations

import dataclasses
import itertools
import random
from dataclasses import replace

import pytest

from keras_distplug.core import events
from keras_distplug.core.events import SUPERVISOR, Entry, Event, Window
from keras_distplug.core.ledger import Category, Ledger, split
from keras_distplug.runlog import goodput_totals
from keras_distplug.runlog.goodput_totals import Fit

C = Category


def began(session: str, rank: int = 0, step: int = 0) -> events.Began:
    return events.Began(session, rank, 2, 2, "host", 1, "Strategy", 9, step)


def window(at: float, last: int, count: int, job: str | None = None, **secs: float) -> Entry:
    return Entry(at, "worker-0", Window(last, count, 0, secs), job, 0 if job else None)


def fit(*entries: Entry, session: str = "a", rank: int = 0, step: int = 0) -> Fit:
    first = began(session, rank, step)
    job, attempt = entries[0].job, entries[0].attempt
    return Fit(first, (Entry(entries[0].at - 0.5, "worker-0", first, job, attempt), *entries))


def of_supervisor(at: float, event: Event, attempt: int = 0) -> Entry:
    return Entry(at, SUPERVISOR, event, "job", attempt)


def whole(spans: list[goodput_totals.Span]) -> float:
    return spans[-1].end - spans[0].begin


def test_one_attempt() -> None:
    """Windows follow each other without a gap, from the start of the process."""
    found = goodput_totals.spans(
        [fit(window(103, 0, 0, start_up=3), window(110, 70, 70, step=6, other=1))]
    )
    secs = goodput_totals.totals(found)
    assert (found[0].begin, found[-1].end) == (100, 110)
    assert {name: each for name, each in secs.items() if each} == {
        C.START_UP: 3,
        C.STEP: 6,
        C.OTHER: 1,
    }
    assert goodput_totals.goodput(secs) == pytest.approx(0.6)


def test_killed() -> None:
    """The time from the last entry of a killed attempt to the next process is recovery. Repeated
    steps are not progress; the new share of a partly repeated window is."""
    found = goodput_totals.spans(
        [
            fit(window(10, 40, 40, start_up=2, step=8)),
            fit(
                window(24, 20, 0, start_up=3, restore=1),
                window(28, 60, 40, step=3, input=1),
                session="b",
                step=20,
            ),
        ]
    )
    secs = goodput_totals.totals(found)
    assert secs[C.RECOVERY] == 10
    assert secs[C.REDONE] == pytest.approx(2)  # 20 of 40 steps, of 4 s
    assert secs[C.STEP] == pytest.approx(8 + 1.5)
    assert secs[C.INPUT] == pytest.approx(0.5)
    assert sum(secs.values()) == pytest.approx(whole(found)) == 28


def test_restarted_worker() -> None:
    """A single worker's restart ends no attempt, and takes no time from the chief."""
    fits = [fit(window(103, 0, 0, "job", start_up=3), window(110, 70, 70, "job", step=7))]
    again = events.StartedAgain("worker-1", "FAILED", 137, 1, 0.0, "worker-1 was killed")
    told = [of_supervisor(99, events.Started(("chief-0", "worker-0", "worker-1", "ps-0"), (0, 1)))]
    supervised = [*told, of_supervisor(105, again)]
    assert goodput_totals.spans(fits, supervised) == goodput_totals.spans(fits, told)
    assert goodput_totals.attempts(fits, supervised) == goodput_totals.attempts(fits, told)
    [attempt] = goodput_totals.attempts(fits, supervised)
    assert (attempt.end, attempt.exit_code) == (None, None)


@pytest.mark.parametrize(
    ("last", "category"),
    [
        (events.Finished(40, 9, False), C.OTHER),
        (events.Preempted("Ctrl-C", "worker-0", True, 40), C.OTHER),
        (events.Preempted("SIGTERM", "worker-0", False, 40), C.RECOVERY),
        (events.PeerLost("worker-1"), C.RECOVERY),
    ],
)
def test_time_after_the_end(last: Event, category: Category) -> None:
    """Time after a run that has finished, or that its user has stopped, is not recovery."""
    found = goodput_totals.spans(
        [
            fit(window(10, 40, 40, step=10), Entry(10, "worker-0", last)),
            fit(window(90, 80, 40, step=10), session="b", step=40),
        ]
    )
    assert goodput_totals.totals(found)[category] == 70


def test_overlapping() -> None:
    """A window that overlaps time already counted only counts from there on."""
    found = goodput_totals.spans(
        [
            fit(window(10, 40, 40, step=10)),
            fit(window(12, 40, 0, start_up=9), window(13, 50, 10, step=1), session="b", step=40),
        ]
    )
    secs = goodput_totals.totals(found)
    assert (secs[C.START_UP], secs[C.RECOVERY]) == (2, 0)
    assert sum(secs.values()) == whole(found) == 13


def test_clock_that_jumps() -> None:
    """Time that the worker's own windows do not cover counts as other."""
    found = goodput_totals.spans([fit(window(10, 40, 40, step=10), window(60, 80, 40, step=10))])
    assert goodput_totals.totals(found)[C.OTHER] == 40


def test_clock_set_back() -> None:
    """Time that cannot be placed is not counted, but the step still advances."""
    found = goodput_totals.spans(
        [
            fit(window(100, 40, 40, step=10)),
            fit(window(60, 80, 40, step=10), window(110, 90, 10, step=10), session="b", step=40),
        ]
    )
    assert found[-1].step == 90
    assert sum(goodput_totals.totals(found).values()) == pytest.approx(whole(found)) == 20
    made = goodput_totals.Timeline(100.0)
    assert [*made.take(60, Window(80, 40, 0, {"step": 10.0}))] == []
    assert [each.step for each in made.pause(101.0)] == [80]


def test_separate_trainings() -> None:
    """Without a resumable run, a `fit` that starts at step 0 repeats nothing."""
    first = fit(window(10, 40, 40, step=10))
    for resumes, redone in ((True, 10), (False, 0)):
        second = fit(window(20, 40, 40, step=10), session="b")
        second = Fit(dataclasses.replace(second.began, resumes=resumes), second.entries)
        assert goodput_totals.totals(goodput_totals.spans([first, second]))[C.REDONE] == redone
        lost = [each.lost_steps for each in goodput_totals.attempts([first, second])]
        assert lost == [40 if resumes else 0, 0]


def test_lost_steps_within_a_fit() -> None:
    """Skipped updates and steps that were rolled back do not count as progress, and are counted
    once."""
    left_out = events.UpdateLeftOut(0, 1, 1, (0,), ("w",), None, None, False, None, "a NaN")
    found = [
        fit(
            window(10, 10, 10, step=10),
            Entry(10, "worker-0", left_out),
            window(20, 20, 10, step=10),
            Entry(20, "worker-0", left_out),
            Entry(20, "worker-0", events.RolledBack(15, 1, "NaN")),
            window(30, 30, 10, step=10),
        )
    ]
    secs = goodput_totals.totals(goodput_totals.spans(found))
    assert (secs[C.REDONE], secs[C.STEP]) == (1 + 5, 24)


def test_ended_by_an_error() -> None:
    """An attempt's end is the error that was logged, rather than the exit that the supervisor
    observed, unless another worker failed first."""
    failed = of_supervisor(11, events.Failed("worker-0", "FAILED", 1, "worker-0 exited with 1"))
    raised = Entry(10, "worker-0", events.Raised("ValueError: no"), "job", 0)
    [found] = goodput_totals.attempts([fit(window(10, 40, 40, "job", step=10), raised)], [failed])
    assert (found.end, found.exit_code) == ("ValueError: no", 1)
    killed = of_supervisor(11, events.Failed("worker-1", "FAILED", 137, "worker-1 was killed"))
    [found] = goodput_totals.attempts([fit(window(10, 40, 40, "job", step=10), raised)], [killed])
    assert (found.end, found.exit_code) == ("worker-1 was killed", 137)


def test_supervised() -> None:
    """With a supervisor, time runs from its start of the first attempt to its own end."""
    supervised = [
        of_supervisor(1, events.Started(("worker-0",), (0,))),
        of_supervisor(30, events.Ended(0, "")),
        Entry(99, SUPERVISOR, events.Ended(0, ""), "another job", 0),
    ]
    found = goodput_totals.spans([fit(window(20, 40, 40, "job", start_up=5, step=10))], supervised)
    secs = goodput_totals.totals(found)
    assert (found[0].begin, found[-1].end) == (1, 30)
    assert (secs[C.START_UP], secs[C.STEP], secs[C.RECOVERY]) == (9, 10, 10)


def test_recent_goodput() -> None:
    """A span that extends beyond the limits counts in proportion."""
    found = goodput_totals.spans(
        [fit(window(10, 10, 10, step=10), window(30, 20, 10, step=10, input=10))]
    )
    assert goodput_totals.goodput(goodput_totals.totals(found, since=20)) == 0.5
    assert sum(goodput_totals.totals(found, since=20, until=25).values()) == 5


@pytest.mark.parametrize("seed", range(20))
def test_sum(seed: int) -> None:
    """The categories sum to the time from the first entry to the last one, whatever the
    attempts."""
    rng = random.Random(seed)
    fits, at, step = [], 100.0, 0
    for number in range(rng.randint(1, 5)):
        at += rng.uniform(-3, 30)
        step = max(0, step - rng.randint(0, 50))
        first, entries = step, []
        for _ in range(rng.randint(1, 8)):
            secs = {name: rng.uniform(0, 3) for name in rng.sample([str(c) for c in C], 4)}
            at += max(0.0, sum(secs.values()) + rng.uniform(-1, 1))
            steps = rng.randint(0, 30)
            step += steps
            entries.append(window(at, step, steps, **secs))
        fits.append(fit(*entries, session=str(number), step=first))
    found = goodput_totals.spans(fits)
    assert sum(goodput_totals.totals(found).values()) == pytest.approx(whole(found))
    assert all(value >= -1e-9 for span in found for value in span.secs.values())
    assert all(a.end == b.begin for a, b in itertools.pairwise(found))


def test_attempts() -> None:
    """An attempt has its first and last step, its lost steps, its cause of end and its exit
    code."""
    failed = events.Failed("worker-1", "FAILED", 137, "worker-1 was killed by SIGKILL")
    fits = [
        fit(window(10, 40, 40, "job", step=10)),
        fit(window(10.5, 42, 42, "job", step=10), rank=1),
        fit(window(30, 60, 30, step=10), session="b", step=30),
        fit(
            window(50, 90, 30, step=10),
            Entry(50, "worker-0", events.Finished(90, 9, False)),
            session="c",
            step=60,
        ),
    ]
    found = goodput_totals.attempts(fits, [of_supervisor(11, failed)])
    assert [(each.first_step, each.last_step, each.lost_steps) for each in found] == [
        (0, 42, 12),
        (30, 60, 0),
        (60, 90, 0),
    ]
    assert [each.end for each in found] == ["worker-1 was killed by SIGKILL", None, "finished"]
    assert [each.exit_code for each in found] == [137, None, None]


def test_attempt_with_unlogged_steps() -> None:
    """If the next attempt knows the exact last step, lost steps are counted up to there; attempts
    are numbered from 1."""
    fits = [
        fit(window(10, 40, 40, step=10)),
        fit(window(30, 60, 30, step=10), session="b", step=30),
    ]
    fits[1] = replace(fits[1], began=replace(fits[1].began, reached_before=47))
    first, second = goodput_totals.attempts(fits)
    assert (first.number, first.last_step, first.lost_steps) == (1, 47, 17)
    assert (second.number, second.last_step, second.lost_steps) == (2, 60, 0)


@pytest.mark.parametrize(
    ("last", "exact"),
    [
        (events.Beat(44), False),  # and then it was killed
        (events.Preempted("SIGTERM", "worker-0", False, 40), True),
        (events.Raised("ValueError: no room"), True),
    ],
)
def test_lost_steps_without_a_supervisor(last: Event, exact: bool) -> None:
    """The log of a killed process ends before its last steps, so their number is a lower bound."""
    fits = [
        fit(window(10, 40, 40, step=10), Entry(11, "worker-0", last)),
        fit(window(30, 60, 20, step=10), session="b", step=40),
    ]
    first, second = goodput_totals.attempts(fits)
    assert (first.lost_steps, first.lost_is_exact) == (0 if exact else 4, exact)
    assert second.lost_is_exact


def test_attempt_that_died_after_its_checkpoint() -> None:
    """Steps in a checkpoint were trained, even if the process died before it logged their
    window."""
    saved = Entry(11, "worker-0", events.Saved(60, 0.5, False, 0.01, 1000))
    fits = [
        fit(window(10, 54, 54, step=10), saved),
        fit(window(30, 90, 30, step=9), session="b", step=60),
    ]
    first, second = goodput_totals.attempts(fits)
    assert (first.last_step, first.lost_steps) == (second.first_step, 0) == (60, 0)


def test_ledger() -> None:
    """Every second is recorded once; time that was part of another category is moved."""
    ledger = Ledger(10.0, C.START_UP)
    ledger.switch(C.STEP, 12.0)
    ledger.switch(C.OTHER, 15.0)
    ledger.spent(C.SAVE, 0.5, 16.0)
    assert ledger.take(17.0) == {C.START_UP: 2, C.STEP: 3, C.OTHER: 1.5, C.SAVE: 0.5}
    assert ledger.take(18.0) == {C.OTHER: 1}


def test_split() -> None:
    """Parts are limited to the available time."""
    assert split({C.STEP: 2.0}, C.STEP, {C.INPUT: 0.5, C.SYNC: 9.0}) == {
        C.STEP: 0.0,
        C.INPUT: 0.5,
        C.SYNC: 1.5,
    }
    assert split({C.OTHER: 1.0}, C.STEP, {C.INPUT: 1.0})[C.INPUT] == 0
