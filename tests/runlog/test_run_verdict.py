"""The verdict on the first screen: the right state at the right time, and the answers to the
questions of an engineer on call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from support import logged

from keras_distplug.core import events
from keras_distplug.core.events import SUPERVISOR, Entry, Event, Window
from keras_distplug.runlog.goodput_totals import Fit
from keras_distplug.runlog.incident_groups import Place
from keras_distplug.runlog.run_state import State
from keras_distplug.runlog.run_verdict import Verdict
from keras_distplug.runlog.summary import judged
from keras_distplug.storage.survey import CheckpointState

BEGIN = 1000.0
STEPS = 10  # of a window, which takes a second


def worker(
    windows: int = 30,
    *more: tuple[float, Event],
    rank: int = 0,
    workers: int = 1,
    job: str | None = None,
    steps_per_epoch: int | None = 1000,
    begin: float = BEGIN,
    attempt: int = 0,
    first_step: int = 0,
    window_s: float = 1.0,
) -> Fit:
    """Returns a worker's `fit`; `more` are events with their seconds since the last window."""
    began = events.Began(
        f"session-{attempt}", rank, workers, workers, f"node-{rank}", 1, "Strategy", 4, first_step,
        {}, True, None, steps_per_epoch,
    )  # fmt: skip
    told: list[tuple[float, Event]] = [(begin, began)]
    for number in range(1, windows + 1):
        secs = {"step": window_s} if number > 1 else {"start_up": 1.0}
        at, step = begin + number * window_s, first_step + STEPS * number
        told.append((at, Window(step, STEPS, 0, secs, window_s / STEPS, loss=1 / step)))
    last = told[-1][0]
    told += [(last + after, event) for after, event in more]
    entries = tuple(Entry(at, f"worker-{rank}", event, job, attempt) for at, event in told)
    return Fit(began, entries)


def beat(idle_s: float, doing: str = "step", step: int = 300) -> events.Beat:
    return events.Beat(step, doing, idle_s)


def judge(
    fits: Sequence[Fit],
    now: float,
    supervised: Sequence[Entry] = (),
    checkpoints: Any = None,
    **more: Any,
) -> Verdict:
    place = Place("/runs/mnist", "run-0001")
    return judged(fits, supervised, now, checkpoints, place, **more).verdict


def said(after: float, event: Event, attempt: int = 0) -> Entry:
    """Returns a supervisor's event, this many seconds after the last window."""
    return Entry(BEGIN + 30 + after, SUPERVISOR, event, "j", attempt)


def failed(code: int = 137) -> events.Failed:
    return events.Failed("worker-0", "FAILED", code, "worker-0 was killed by SIGKILL")


END = BEGIN + 30


@pytest.mark.parametrize(
    ("after", "state", "heard"),
    [
        (11.5, State.TRAINING, "good"),
        (12.5, State.SILENT, "good"),
        (15.5, State.SILENT, "warn"),
        (59.0, State.SILENT, "warn"),
        (61.0, State.DEAD, "bad"),
    ],
)
def test_silence(after: float, state: State, heard: str) -> None:
    found = judge([worker()], END + after)
    assert (found.state, found.heard_level) == (state, heard)
    assert found.heard_at == END
    if state is not State.TRAINING:
        assert found.since == END
        assert found.where == ("worker-0 on node-0",)


def test_time_of_the_next_check() -> None:
    """The verdict says until when it holds: the page asks again then, and not before."""
    for after, until in ((1.0, 12.0), (13.0, 15.0), (20.0, 60.0)):
        assert judge([worker()], END + after).until == END + until
    assert judge([worker()], END + 100).until == float("inf")


def test_store() -> None:
    """Log entries in a store arrive late, so silence is judged with the same delay."""
    assert judge([worker()], END + 80, delay_secs=70).state is State.TRAINING
    assert judge([worker()], END + 90, delay_secs=70).state is State.SILENT
    assert judge([worker()], END + 140, delay_secs=70).state is State.DEAD


@pytest.mark.parametrize(
    ("beaten", "state"),
    [
        (beat(5.0), State.TRAINING),
        (beat(12.0), State.STALLED),
        (beat(60.0, "evaluation"), State.TRAINING),
        (beat(60.0, "other"), State.TRAINING),
        (beat(130.0, "other"), State.STALLED),
        (events.Beat(), State.TRAINING),  # of an earlier version
    ],
)
def test_heartbeats_without_steps(beaten: events.Beat, state: State) -> None:
    found = judge([worker(30, (5.0, beaten))], END + 6)
    assert found.state is state
    if state is State.STALLED:
        assert found.since == pytest.approx(END + 5 - (beaten.idle_s or 0))


def test_slow_steps_are_no_stall() -> None:
    """Slow steps have a longer limit: a step that usually takes 6 s may take 20 s."""
    fit = worker(10, (5.0, beat(20.0)), window_s=60.0)
    assert judge([fit], fit.ends_at + 1).state is State.TRAINING


def test_worker_that_others_wait_for() -> None:
    """The worker that the others wait for is named: one that is not in a step, or one that is
    silent."""
    waits = worker(30, (20.0, beat(20.0)), workers=2)
    elsewhere = worker(30, (20.0, beat(20.0, "other")), rank=1, workers=2)
    found = judge([waits, elsewhere], END + 21)
    assert (found.state, found.where) == (State.STALLED, ("worker-1 on node-1",))
    silent = worker(30, rank=1, workers=2)
    found = judge([waits, silent], END + 21)
    assert (found.state, found.where) == (State.STALLED, ("worker-1 on node-1",))
    assert found.cause == "no log entries from worker-1 on node-1"
    assert (found.advice, found.command) == (
        "Look at the process on node-1:",
        "py-spy dump --pid 1",
    )


def test_hang() -> None:
    """HangWatchdog's report takes effect immediately, until steps are trained again."""
    hang = events.Hung("worker-1 does not take part in step 301")
    found = judge([worker(30, (2.0, hang), job="j")], END + 3, [said(-40, STARTED)])
    assert (found.state, found.level, found.cause) == (State.STALLED, "bad", hang.what)
    assert found.advice == "Read the stack traces of all workers, in /runs/mnist/hangs."
    assert found.recovery.startswith("yes, from the start, once HangWatchdog")
    resumed = Window(310, 10, 0, {"step": 1.0})
    assert judge([worker(30, (2.0, hang), (3.0, resumed))], END + 4).state is State.TRAINING


STARTED = events.Started(("worker-0",), (0,))


@pytest.mark.parametrize(
    ("supervised", "now", "state", "recovery"),
    [
        ([said(1, failed())], 1.5, State.DEAD, "yes"),
        ([said(1, failed()), said(2, events.Again(5.0, (0,)), 0)], 3, State.RESTARTING, "yes"),
        ([said(1, failed()), said(2, events.Again()), said(3, STARTED, 1)], 60, State.RESTARTING,
         "yes"),
        ([said(1, failed()), said(2, STARTED, 1)], 2000, State.DEAD, "no"),
        ([said(1, failed())], 2000, State.DEAD, "no"),
        ([said(1, failed()), said(2, events.Ended(1, "too many restarts"))], 9999, State.FAILED,
         "no: the supervisor has given up"),
        ([said(-29.5, events.Training(5.0, "a kill"))], 1, State.TRAINING, "yes"),
    ],
)  # fmt: skip
def test_state_from_the_supervisor(
    supervised: list[Entry], now: float, state: State, recovery: str
) -> None:
    found = judge([worker(job="j")], END + now, [said(-40, STARTED), *supervised])
    assert found.state is state
    assert found.recovery.startswith(recovery)
    if state in (State.DEAD, State.FAILED, State.RESTARTING):
        assert found.where == ("worker-0 on node-0",)
        assert found.heard_level == "bad"


def test_error_of_a_worker() -> None:
    """The cause combines the exit that the supervisor observed and the error that was logged."""
    raised = events.Raised("ValueError: no room")
    told = [said(-40, STARTED), said(1, failed(1)), said(2, events.Ended(1, "gave up"))]
    found = judge([worker(30, (0.5, raised), job="j")], END + 3, told)
    assert found.cause == "worker-0 was killed by SIGKILL: ValueError: no room; gave up"
    assert found.advice.startswith("Fix the error")


def test_starting() -> None:
    assert judge([], BEGIN, [said(-31, STARTED)]).state is State.STARTING
    starting = judge([worker(0)], BEGIN + 5)
    assert (starting.state, starting.level) == (State.STARTING, "good")


@pytest.mark.parametrize(
    ("event", "state"),
    [
        (events.Finished(300, 4), State.FINISHED),
        (events.Preempted("SIGTERM", "worker-0"), State.STOPPED),
        (events.Raised("ValueError: no room"), State.FAILED),
        (events.PeerLost("worker-1"), State.DEAD),
    ],
)
def test_ends(event: Event, state: State) -> None:
    """The end that a worker has logged remains the state, however long ago it was."""
    for after in (1, 1_000_000):
        found = judge([worker(30, (0.5, event))], END + after)
        assert (found.state, found.since, found.has_ended) == (state, END + 0.5, True)
        assert found.until == float("inf")
        assert not found.is_training


def test_lost_steps_without_a_later_checkpoint() -> None:
    """The number of lost steps is only claimed if the log extends to the end."""
    saved = {300: CheckpointState("committed", True)}
    save = events.Saved(300, 0.1, False, 0.01, 1000)
    killed = judge([worker(30, (0.1, save))], END + 100, checkpoints=saved)
    assert (killed.state, killed.lost) == (State.DEAD, "not known: its log ends at checkpoint 300")
    raised = (0.2, events.Raised("ValueError: no room"))
    failed = judge([worker(30, (0.1, save), raised)], END + 100, checkpoints=saved)
    assert (failed.state, failed.lost) == (State.FAILED, "nothing")


def test_death_reported_by_another_worker() -> None:
    """A dead worker is named by another worker that lost it."""
    survivor = worker(30, (10.0, events.PeerLost("worker-1 on node-1")), workers=2)
    found = judge([survivor, worker(30, rank=1, workers=2)], END + 11)
    assert (found.state, found.where) == (State.DEAD, ("worker-1 on node-1",))


def test_slow() -> None:
    """A run is slow compared with its own past, or because of a straggler that has not
    recovered."""
    windows = [(float(n), Window(300 + n, 1, 0, {"step": 1.0}, 1.0)) for n in range(1, 31)]
    found = judge([worker(100, *windows)], END + 101)
    assert found.progress.relative_speed == pytest.approx(0.1)
    assert (found.state, found.slow[:4]) == (State.SLOW, "10 %")
    slow = events.SlowReplica("compute", 0, "worker-0 on node-0", 0.2, 0, 0.1, False, "it is slow")
    found = judge([worker(30, (0.5, slow))], END + 1)
    assert (found.state, found.slow, found.where) == (
        State.SLOW,
        "it is slow",
        ("worker-0 on node-0",),
    )
    assert "worker-0 on node-0" in found.advice
    over = dataclasses.replace(slow, is_over=True)
    told = [(0.1, slow), (0.2, over), (0.3, slow), (0.4, slow)]
    assert judge([worker(30, *told)], END + 1).groups[0].count == 2
    assert judge([worker(30, *told, (0.9, over))], END + 1).state is State.TRAINING
    again = worker(5, begin=END + 10, attempt=1)
    assert judge([worker(30, *told), again], END + 16).state is State.TRAINING


def test_slow_callbacks_are_not_slow_training() -> None:
    windows = [
        (float(n), Window(300 + n, 10, 0, {"step": 0.5, "other": 5.0}, 0.1)) for n in range(1, 31)
    ]
    assert judge([worker(100, *windows)], END + 101).state is State.TRAINING


def test_progress() -> None:
    """Progress has steps and epochs with their totals, speed, time left and loss."""
    found = judge([worker()], END + 1).progress
    assert (found.step, found.steps, found.epoch, found.epochs) == (300, 4000, 1, 4)
    assert found.speed == pytest.approx(10)
    assert found.left_secs == pytest.approx(370)
    assert found.loss == pytest.approx(1 / 300)
    ended = events.EpochEnded(0, 300, {"loss": 0.5, "val_loss": 0.75})
    fit = worker(30, (0.1, ended), steps_per_epoch=None)
    found = judge([fit], END + 1).progress
    assert found.steps == 1200  # the first epoch has shown the number of steps
    assert dict(found.logs)["val_loss"] == 0.75
    assert judge([worker(steps_per_epoch=None)], END + 1).progress.steps is None
    restored = events.Restored(500, 1, 200, "there")
    again = worker(2, (0.1, restored), first_step=500, steps_per_epoch=300)
    assert judge([again], END).progress.steps == 1200


def skipped_update(batch: int = 17, variable: str = "dense/kernel") -> events.UpdateLeftOut:
    what = f"batch {batch}: the gradient of {variable} has a NaN"
    return events.UpdateLeftOut(0, batch, 1, (1,), ("worker-1 on a",), variable, what=what)


def test_groups() -> None:
    """Equal incidents are one group, the newest group is first, and every group has advice."""
    save = events.SaveFailed(10, 1, False, "[Errno 28] No space left on device")
    told = [skipped_update(n) for n in range(5)] + [save, skipped_update(9, "other")]
    fit = worker(30, *((0.1 * n, event) for n, event in enumerate(told)))
    other, failed_save, first = judge([fit], END + 1).groups
    assert (first.title, first.count, first.replicas) == ("NaN in `dense/kernel`", 5, (1,))
    assert (first.first_at, first.last_at) == (END, pytest.approx(END + 0.4))
    assert first.command == "keras-distplug replay /runs/mnist"
    assert "epoch-1-batch-5-replica-1" in first.advice
    assert other.title == "NaN in `other`"
    assert "No space left on device" in failed_save.what
    assert "Free disk space" in failed_save.advice
    assert judge([fit], END + 1).command == "keras-distplug replay /runs/mnist"


def test_storage_fails() -> None:
    """The first screen gives the error of a failed save once, and what to do if the log stops."""
    why = "The checkpoint of step 40 could not be written to /runs: no space. Free disk space."
    fit = worker(30, (0.1, events.SaveFailed(40, 1, False, why)))
    assert judge([fit], END + 1).advice == f"Checkpoint failed: {why}"
    silent = judge([fit], END + 14)
    assert silent.state is State.SILENT
    assert "The storage fails" in silent.advice
    assert "storage of the log is not full" in judge([worker(30)], END + 14).advice


def test_origin_of_nan() -> None:
    """Incidents of one origin are equal, although their numbers differ."""
    told = [
        dataclasses.replace(
            skipped_update(n), origin=f"the batch: {n} of 128 values in `x` are not finite"
        )
        for n in (8, 16)
    ]
    [group] = judge([worker(30, *((0.1, event) for event in told))], END + 1).groups
    assert (group.title, group.count) == ("NaN in the batch (`x`)", 2)


def test_command_lines_are_quoted() -> None:
    assert Place("/my runs/a'b").command("replay") == "keras-distplug replay '/my runs/a'\"'\"'b'"


def test_eight_questions() -> None:
    """After a kill, the verdict names the worker, the time, the lost steps, the safe checkpoint,
    the cause, the expected recovery, the speed, and the next action."""
    fits, supervised, _ = logged.fits(4, 100)
    first = [fit for fit in fits if fit.began.session == "session-0"]
    supervised = supervised[:2]
    now = supervised[1].at + 5
    looked = {1000: CheckpointState("committed", True), 500: CheckpointState("committed", True)}
    found = judged(first, supervised, now, looked, Place("/runs/mnist", "run-0001"))
    shown = found.verdict
    assert shown.where == ("worker-1 on node-1",)
    assert shown.since == supervised[1].at
    assert shown.lost == "not known: its log ends at checkpoint 1000"
    assert found.last_checkpoint is not None
    assert (found.last_checkpoint["step"], found.last_checkpoint["verified"]) == (1000, "sizes")
    assert shown.cause == "worker-1 was killed"
    assert shown.recovery == "yes: the supervisor restarts the workers, from step 1000"
    assert shown.slow.startswith("nothing")
    assert shown.advice == "Wait: the supervisor decides about a restart."
    without = judged(first, supervised, now, {500: CheckpointState("committed", True)}).verdict
    assert without.lost == "at least 500 steps (since checkpoint 500)"


def test_vanished_supervisor() -> None:
    """A supervisor would have reported that all workers are silent. If it did not, it is gone, and
    no worker will be restarted."""
    found = judge([worker(job="j")], END + 100, [said(-40, STARTED)])
    assert (found.state, found.has_ended) == (State.DEAD, True)
    assert found.recovery.startswith("no")
    assert not judge([worker(job="j")], END + 50, [said(-40, STARTED)]).has_ended


def test_unsupervised() -> None:
    found = judge([worker()], END + 100)
    assert found.recovery.startswith(
        "no: no supervisor is running. The same command starts again from"
    )
    assert found.lost == "at least 300 steps (there is no checkpoint)"
    assert "alive" in found.advice
