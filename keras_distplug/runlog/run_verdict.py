"""Is a run alive, is it healthy, and what should be done: the judgement that the tab, the report
and `keras-distplug watch` show on their first screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keras_distplug.core.events import LAST_WORDS, Entry
from keras_distplug.core.ledger import Category
from keras_distplug.runlog import goodput_totals
from keras_distplug.runlog.goodput_totals import Attempt, Fit, Span
from keras_distplug.runlog.incident_groups import Group, Place, grouped, incidents
from keras_distplug.runlog.run_progress import Progress, get_step, progress
from keras_distplug.runlog.run_state import ENDED, LEVELS, Clock, Finding, Run, State

_SLOW = 0.67  # of the usual speed
_WAITS = 0.2  # a share of time that is worth mentioning
_LATELY_SECS = 300.0
_TRAINS = frozenset({State.TRAINING, State.SLOW, State.SILENT})


@dataclass(frozen=True)
class Verdict:
    """The state of a run, and the answers to the first questions about it.

    Args:
        state: The state.
        since: Since when, in seconds since 1970; None if that is not known.
        cause: Why it is in this state.
        where: Workers that the cause is about, with their machines.
        heard_at: When any worker last wrote to the log.
        heard_level: `"good"`, `"warn"` or `"bad"`, for the age of `heard_at`; `"none"` if no word
            is expected.
        lost: How much work was lost, or would be.
        recovery: Whether it recovers on its own.
        slow: What slows it down.
        advice: What to do next.
        command: A command line that helps, or None.
        progress: Steps, speed and loss.
        is_training: Whether steps are being trained now, so that the speed is that of today.
        groups: What went wrong, newest first.
        has_ended: Whether training has ended, and no supervisor restarts it.
        until: When all of this may change without news, in seconds since 1970.
    """

    state: State
    since: float | None
    cause: str
    where: tuple[str, ...]
    heard_at: float | None
    heard_level: str
    lost: str
    recovery: str
    slow: str
    advice: str
    command: str | None
    progress: Progress
    is_training: bool
    groups: tuple[Group, ...]
    has_ended: bool
    until: float

    @property
    def level(self) -> str:
        """`"good"`, `"done"`, `"warn"`, `"bad"` or `"none"`."""
        return LEVELS[self.state]


def verdict(
    fits: Sequence[Fit],
    supervised: Sequence[Entry],
    now: float,
    *,
    attempts: Sequence[Attempt],
    spans: Sequence[Span],
    checkpoint: Mapping[str, Any] | None,
    place: Place,
    delay_secs: float = 0.0,
) -> Verdict:
    """Judges a run.

    Args:
        fits: The fits of all workers.
        supervised: The supervisors' events.
        now: Seconds since 1970.
        attempts: As from `goodput_totals.attempts`.
        spans: As from `goodput_totals.spans`.
        checkpoint: The newest committed checkpoint, with its `step`, or None.
        place: The place of the run, for command lines.
        delay_secs: How much later than written a line can be read; more than 0 in a remote store.
    """
    clock = Clock(now)
    run = Run(fits, supervised, clock, delay_secs)
    finding = run.finding()
    groups = grouped(incidents(fits, supervised), run.hosts, place)
    made = progress(goodput_totals.chiefs(fits))
    slow = _slow(run.current(groups), made, spans, finding.state)
    if finding.state is State.TRAINING and slow.is_bad:
        finding = Finding(State.SLOW, slow.since or finding.since, slow.what, slow.where)
    advice, command = _advice(finding, groups, run)
    return Verdict(
        state=finding.state,
        since=finding.since,
        cause=finding.cause,
        where=finding.where,
        heard_at=run.heard_at,
        heard_level=run.heard_level(finding.state),
        lost=_lost(finding.state, attempts, spans, checkpoint, run),
        recovery=_recovery(finding, checkpoint, run),
        slow=slow.what,
        advice=advice,
        command=command,
        progress=made,
        is_training=finding.state in _TRAINS,
        groups=tuple(groups),
        has_ended=finding.state in ENDED
        and (finding.state in (State.FINISHED, State.FAILED) or not run.is_supervised),
        until=clock.until,
    )


@dataclass(frozen=True)
class _Slow:
    what: str
    is_bad: bool = False
    since: float | None = None
    where: tuple[str, ...] = ()


def _slow(groups: Sequence[Group], made: Progress, spans: Sequence[Span], state: State) -> _Slow:
    """Returns what slows the run down."""
    stragglers = [
        group for group in groups if group.kind == "slow_replica" and group.over_at is None
    ]
    ratio = None if state in ENDED else made.relative_speed
    if stragglers:
        first = stragglers[0]
        more = f"; {len(stragglers) - 1} more below" if len(stragglers) > 1 else ""
        return _Slow(f"{first.what}{more}", True, first.first_at, first.where)
    if ratio is not None and ratio < _SLOW:
        what = f"{100 * ratio:.0f} % of its usual speed; no replica is reported as a straggler"
        return _Slow(what, True)
    if not spans:
        return _Slow("not known yet")
    secs = goodput_totals.totals(spans, spans[-1].end - _LATELY_SECS)
    whole_s = sum(secs.values())
    waits = {
        Category.INPUT: "waiting for data",
        Category.SYNC: "waiting for other workers",
        Category.SAVE: "paused for checkpoints",
        Category.EVALUATION: "validation",
        Category.OTHER: "callbacks and other code between steps",
    }
    worst = max(waits, key=lambda each: secs[each])
    if state not in ENDED and whole_s and secs[worst] > _WAITS * whole_s:
        share = 100 * secs[worst] / whole_s
        return _Slow(f"{share:.0f} % of the last minutes: {waits[worst]}")
    return _Slow("nothing: no straggler" + ("" if ratio is None else ", usual speed"))


def _lost(
    state: State,
    attempts: Sequence[Attempt],
    spans: Sequence[Span],
    checkpoint: Mapping[str, Any] | None,
    run: Run,
) -> str:
    """Describes the work that was lost, or would be if the run died now."""
    redone_s = goodput_totals.totals(spans)[Category.REDONE]
    before = sum(attempt.lost_steps for attempt in attempts)
    restarts = max(len(attempts) - 1, 0)
    # The log of a process that was killed ends before its last steps.
    is_exact = all(attempt.lost_is_exact for attempt in attempts)
    past = f"{_count(before, 'step')} in {_count(restarts, 'restart')}"
    if not is_exact:
        past = f"at least {past}" if before else f"not known in {_count(restarts, 'restart')}"
    if redone_s >= 1:
        past += f" ({redone_s:.0f} s trained twice)"
    if run.chief is None:
        return "nothing"
    has_lost = before > 0 or not is_exact
    if state is State.FINISHED:
        return past if has_lost else "nothing"
    step = max(get_step(fit) for fit in run.group)
    saved = 0 if checkpoint is None else int(checkpoint["step"])
    at_risk = _count(max(step - saved, 0), "step")
    if state in ENDED or state is State.RESTARTING:
        has_told_all = any(isinstance(fit.entries[-1].event, LAST_WORDS) for fit in run.group)
        earlier = f"; before: {past}" if restarts and has_lost else ""
        if step <= saved:
            lost = "nothing" if has_told_all else f"not known: its log ends at checkpoint {saved}"
            return f"{lost}{earlier}"
        least = "" if has_told_all else "at least "
        after = f"since checkpoint {saved}" if checkpoint else "there is no checkpoint"
        return f"{least}{at_risk} ({after}){earlier}"
    now = f"; {at_risk} not yet saved" if step > saved else ""
    return f"{past if has_lost else 'nothing'}{now}"


def _recovery(finding: Finding, checkpoint: Mapping[str, Any] | None, run: Run) -> str:
    start = "from the start" if checkpoint is None else f"from step {checkpoint['step']}"
    match finding.state:
        case State.FINISHED:
            return "not needed"
        case State.UNKNOWN:
            return "not known yet"
        case State.RESTARTING:
            return f"yes: the supervisor is restarting all workers, {start}"
        case State.FAILED if run.said:
            return "no: the supervisor has given up"
    if run.is_supervised:
        if finding.state is State.STALLED:
            return f"yes, {start}, once HangWatchdog has ended the hung process"
        return f"yes: the supervisor restarts the workers, {start}"
    again = "starts again" if checkpoint is None else "resumes"
    if finding.state in ENDED:
        return f"no: no supervisor is running. The same command {again} {start}"
    return f"no: not started by `keras-distplug run`. The same command {again} {start}"


def _advice(finding: Finding, groups: Sequence[Group], run: Run) -> tuple[str, str | None]:
    """Returns what to do next, and a command line that helps."""
    recent = [group for group in groups if group.over_at is None]
    match finding.state:
        case State.FINISHED:
            return "Nothing to do.", None
        case State.UNKNOWN:
            return "Wait for the first worker, or check the directory.", None
        case State.SLOW:
            slow = [group for group in recent if group.kind == "slow_replica"]
            if slow:
                return slow[0].advice, None
            return (
                "See where the time goes (data, other workers, checkpoints): on the page, or with "
                "`keras-distplug goodput`.",
                None,
            )
        case State.RESTARTING:
            return "Wait: training resumes on its own.", None
        case State.DEAD if run.is_supervised:
            return "Wait: the supervisor decides about a restart.", None
        case State.DEAD | State.SILENT if not _ended(recent, run):
            storage = "Check that the storage of the log is not full"
            if any(group.kind in _STORAGE_FAILS for group in run.current(recent)):
                storage = "The storage fails, perhaps for the log, too: free disk space or fix it"
            return (
                f"{storage}. Check that the process and its machine are alive; if the process is "
                "gone, start the same command again.",
                None,
            )
        case State.STALLED if not any(group.kind == "hung" for group in recent[:1]):
            return _look_at_process(run)
    current = run.current(recent)
    if finding.state in ENDED or finding.state is State.STALLED:
        if current:
            # The cause, rather than what follows from it.
            causes = [group for group in current if group.kind in ("raised", "hung")]
            first = (causes or current)[0]
            return first.advice, first.command
        return "Start the same command again: training resumes.", None
    worth = [group for group in current if group.kind in _WORTH]
    if worth:
        first = worth[0]
        # A failed save's error already says what to do.
        text = first.what if first.kind == "save_failed" else first.advice
        return f"{first.title}: {text}", first.command
    return "Nothing to do.", None


def _look_at_process(run: Run) -> tuple[str, str | None]:
    if run.suspect is None:
        return "Look at the stacks of the workers: py-spy dump --pid PID.", None
    began = run.suspect.began
    return f"Look at the process on {began.host}:", f"py-spy dump --pid {began.pid}"


_STORAGE_FAILS = frozenset(("save_failed", "lines_lost"))
_WORTH = frozenset(
    ("update_left_out", "save_failed", "diverged", "quarantined", "lines_lost", "slow_replica")
)


def _ended(recent: Sequence[Group], run: Run) -> bool:
    kinds = {"peer_lost", "raised", "failed", "hung"}
    return any(group.kind in kinds for group in run.current(recent))


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
