"""Tests when a checkpoint is due. Time passes only as a test says."""

from __future__ import annotations

import datetime
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest

from keras_distplug.checkpoint.cadence import (
    AtEnd,
    Auto,
    Cadence,
    EveryBatches,
    EveryEpoch,
    EverySeconds,
    Pace,
    get_cadence,
)
from keras_distplug.core.errors import ConfigurationError


@dataclass
class Run:
    """Simulates steps of `step_s`, and saves that block training for `stall_s` and run for
    `save_s`, during which steps take `excess` times as long.

    Attributes:
        looks: Steps at which the workers checked.
        saves: Steps at which a save started, and the time.
    """

    cadence: Cadence
    step_s: float = 0.1
    stall_s: float = 0.0
    save_s: float = 0.0
    excess: float = 1.0
    wait_if_busy: bool = False
    now_s: float = 1000.0
    looks: list[int] = field(default_factory=list)
    saves: list[tuple[int, float]] = field(default_factory=list)
    saving_until_s: float | None = None

    def steps(self, count: int) -> Run:
        pace = self.pace = Pace(self.cadence, 0, self.now_s, wait_if_busy=self.wait_if_busy)
        look = pace.first_check_step()
        for step in range(1, count + 1):
            saving = self.saving_until_s is not None
            took_s = self.step_s * (self.excess if saving else 1.0)
            self.now_s += took_s
            if self.saving_until_s is not None and self.now_s >= self.saving_until_s:
                self.saving_until_s = None
                pace.saved(self.stall_s, self.save_s)
            pace.stepped(took_s, is_saving=saving)
            if look is not None and step >= look:
                self.looks.append(step)
                busy = self.saving_until_s is not None
                plan = pace.plan_at_check(step, self.now_s, is_saving=busy)
                look = plan.next_look
                if plan.save:
                    self.saves.append((step, self.now_s))
                    self.now_s += self.stall_s
                    self.saving_until_s = self.now_s + self.save_s
        return self

    def intervals_s(self) -> list[float]:
        times = [1000.0, *(now_s for _, now_s in self.saves)]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


@pytest.mark.parametrize(
    ("save_freq", "expected"),
    [
        ("epoch", EveryEpoch()),
        (False, AtEnd()),
        (7, EveryBatches(7)),
        ("auto", Auto(0.02)),
        (datetime.timedelta(minutes=2), EverySeconds(120.0)),
        ("30s", EverySeconds(30.0)),
        ("5min", EverySeconds(300.0)),
        ("1.5 h", EverySeconds(5400.0)),
    ],
)
def test_save_freq(save_freq: Any, expected: Cadence) -> None:
    assert get_cadence(save_freq, 0.02) == expected


@pytest.mark.parametrize(
    "save_freq",
    [0, -1, True, None, 1.5, "batch", "5", "min", "-5min", "0s", "5 days", datetime.timedelta()],
)
def test_unusable_save_freq(save_freq: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"`save_freq`.*Received: "):
        get_cadence(save_freq, 0.01)


def test_batches() -> None:
    """Saves every N batches, and checks only then."""
    run = Run(EveryBatches(10)).steps(35)
    assert [step for step, _ in run.saves] == run.looks == [10, 20, 30]


def test_steps_of_several_batches() -> None:
    """An execution of several batches may run past the step of the next check."""
    pace = Pace(EveryBatches(10), 0, 0.0, wait_if_busy=False)
    assert pace.plan_at_check(12, 1.0, is_saving=False).next_look == 22


@pytest.mark.parametrize(("wait_if_busy", "saves", "skipped"), [(False, 2, 2), (True, 4, 0)])
def test_busy(wait_if_busy: bool, saves: int, skipped: int) -> None:
    """A save that is due while another is in progress is skipped and counted, or waits."""
    run = Run(EveryBatches(10), save_s=1.5, wait_if_busy=wait_if_busy).steps(40)
    assert len(run.saves) == saves
    assert run.pace.skipped == skipped


@pytest.mark.parametrize("step_s", [0.001, 0.1, 7.0, 400.0])
def test_seconds(step_s: float) -> None:
    """Saves at the first step after every interval; checks only a few times in between."""
    run = Run(EverySeconds(300.0), step_s=step_s).steps(max(20, int(3000 / step_s)))
    assert len(run.saves) >= 9
    for interval_s in run.intervals_s():
        assert 300.0 - 1e-6 <= interval_s <= 300.0 + step_s
    assert len(run.looks) / len(run.saves) <= 13


def test_seconds_with_steps_that_vary() -> None:
    """Steps that get slower delay a save by less than the time that was left when that started."""
    run = Run(EverySeconds(60.0), step_s=0.01).steps(5000)
    run.step_s = 1.0
    pace, step, look = run.pace, 5000, run.looks[-1]
    while step < 10_000:
        step += 1
        run.now_s += run.step_s
        pace.stepped(run.step_s, is_saving=False)
        if step >= look:
            plan = pace.plan_at_check(step, run.now_s, is_saving=False)
            if plan.save:
                return
            assert plan.next_look is not None
            look = plan.next_look
    pytest.fail("no save")


@pytest.mark.parametrize("stall_s", [0.05, 0.5])
@pytest.mark.parametrize("excess", [1.0, 1.5])
def test_auto(stall_s: float, excess: float) -> None:
    """Saves take the requested share of the time."""
    run = Run(Auto(0.01), stall_s=stall_s, save_s=2.0, excess=excess).steps(20_000)
    cost_s = stall_s + (excess - 1) * 0.1 * 20 / excess
    spent_s = run.now_s - 1000.0
    assert 0.7 * 0.01 <= len(run.saves) * cost_s / spent_s <= 1.1 * 0.01
    assert run.pace.cost_s == pytest.approx(cost_s, rel=0.2)
    assert run.pace.skipped == 0


def test_auto_with_free_saves() -> None:
    """One save follows the other, but never two at a time."""
    run = Run(Auto(0.01), stall_s=0.0, save_s=5.0).steps(1000)
    assert 15 <= len(run.saves) <= 20
    assert run.pace.skipped == 0


def test_auto_measures_first() -> None:
    """The first save comes early, once a few steps have been timed."""
    run = Run(Auto(0.01), stall_s=1.0).steps(50)
    assert [step for step, _ in run.saves] == [11]


@pytest.mark.parametrize("step_s", [2.0, 10.0, 35.0])
def test_first_save_with_slow_steps(step_s: float) -> None:
    """The first save comes within a minute, if two steps fit into that."""
    run = Run(Auto(0.01), step_s=step_s, stall_s=1.0).steps(20)
    step, _ = run.saves[0]
    assert step * step_s <= 60 or step <= 2


def test_auto_at_the_end_of_an_epoch() -> None:
    """`"auto"` saves there if nothing was saved before, since epochs may have only a few steps; not
    at the last one's end otherwise, since the end of training saves, too."""
    pace = Pace(Auto(0.01), 0, 0.0, wait_if_busy=False)
    for is_last in (False, True):
        assert pace.plan_at_epoch_end(5, 1.0, is_saving=False, is_last=is_last).save is True
        assert pace.plan_at_epoch_end(7, 1.5, is_saving=True, is_last=is_last).save is False
    pace.saved(0.1, 1.0)
    for is_last in (False, True):
        assert pace.plan_at_epoch_end(10, 2.0, is_saving=False, is_last=is_last).save is False
    assert pace.skipped == 0


def test_auto_to_a_store() -> None:
    """Even if saves take almost no time, requests cost money."""
    for is_near, least_s in ((True, 2.0), (False, 20.0)):
        run = Run(get_cadence("auto", 0.01, is_near=is_near), stall_s=0.0, save_s=0.1).steps(2000)
        assert len(run.saves) > 5
        assert min(run.intervals_s()[1:]) >= least_s - 1e-6


def test_epochs() -> None:
    """`"epoch"` saves at every epoch's end; numbers and times also save at the last one's."""
    for cadence, middle, last in (
        (EveryEpoch(), True, True),
        (EveryBatches(7), False, True),
        (EverySeconds(60.0), False, True),
        (AtEnd(), False, False),
    ):
        pace = Pace(cadence, 0, 0.0, wait_if_busy=False)
        assert pace.plan_at_epoch_end(5, 1.0, is_saving=False).save is middle
        assert pace.plan_at_epoch_end(9, 2.0, is_saving=True, is_last=True).save is last
        assert pace.skipped == 0


def test_busy_at_the_end_of_an_epoch() -> None:
    pace = Pace(EveryEpoch(), 0, 0.0, wait_if_busy=False)
    assert pace.plan_at_epoch_end(5, 1.0, is_saving=True).save is False
    assert pace.skipped == 1


def test_best_epochs() -> None:
    """They are saved whatever the cadence, and wait for a save before."""
    for cadence in (EveryEpoch(), EveryBatches(7), EverySeconds(60.0), Auto(0.01), AtEnd()):
        pace = Pace(cadence, 0, 0.0, wait_if_busy=False)
        pace.saved(0.1, 1.0)
        plan = pace.plan_at_epoch_end(5, 1.0, is_saving=True, is_best=True)
        assert plan.save
        assert pace.skipped == 0
