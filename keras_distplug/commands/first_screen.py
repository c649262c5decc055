"""The first screen of a run, as text for a terminal."""

from __future__ import annotations

import datetime
from collections.abc import Iterable

from rich.console import ConsoleRenderable
from rich.console import Group as Drawn
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from keras_distplug.core.printable import printable
from keras_distplug.runlog.incident_groups import Group
from keras_distplug.runlog.run_progress import Progress
from keras_distplug.runlog.summary import Judged

STYLES = {"good": "green", "done": "blue", "warn": "yellow", "bad": "red", "none": "dim"}
# A shape for every level, so that no state is shown by color alone.
SHAPES = {"good": "●", "done": "✓", "warn": "▲", "bad": "✖", "none": "○"}
_VERIFIED = {"sizes": "sizes verified", "read back": "all bytes read back"}
_MOST_GROUPS = 5


def nothing(where: str) -> Drawn:
    """Draws a directory without a log."""
    return Drawn(_text(f"○ UNKNOWN  there is no log in {where} yet", "dim"))


def screen(where: str, name: str, run: Judged, now: float, problem: str = "") -> Drawn:
    """Draws a run.

    Args:
        where: The directory.
        name: The name of the run's folder.
        run: The run's known state.
        now: Seconds since 1970.
        problem: Why the log could not be read since. Defaults to `""`: it could.
    """
    verdict = run.verdict
    style = STYLES[verdict.level]
    banner = Text.assemble(
        (f"{SHAPES[verdict.level]} {verdict.state.upper()}", f"bold {style}"),
        "  ",
        printable(verdict.cause),
    )
    heard = "no worker has reported yet"
    if verdict.heard_at is not None:
        heard = f"last heard {ago(now - verdict.heard_at)}"
    place = Text.assemble(
        (heard, STYLES[verdict.heard_level]), ("  ", ""), (printable(f"{name} in {where}"), "dim")
    )
    return Drawn(
        banner,
        place,
        _text(problem, "red"),
        _pairs(_numbers(run)),
        Text(""),
        _pairs(_answers(run, now)),
        *_incidents(verdict.groups, now),
    )


def _numbers(run: Judged) -> Iterable[tuple[str, str]]:
    progress = run.verdict.progress
    share = ""
    if progress.steps:
        share = f" ({100 * progress.step // progress.steps} %)"
    yield "step", f"{progress.step:,}{_of(progress.steps)}{share}"
    if progress.epoch is not None:
        yield "epoch", f"{progress.epoch:,}{_of(progress.epochs)}"
    yield "speed", _speed(progress, is_training=run.verdict.is_training)
    if not run.verdict.has_ended:
        left = progress.left_secs
        yield "time left", "not known" if left is None else duration(left)
    yield "loss", _loss(progress)
    goodput = run.goodput
    yield "goodput", "not known" if goodput is None else f"{100 * goodput:.1f} %"


def _of(whole: int | None) -> str:
    return "" if whole is None else f" of {whole:,}"


def _speed(progress: Progress, *, is_training: bool) -> str:
    if progress.speed is None:
        return "not known"
    if not is_training:
        return f"{progress.speed:.3g} steps/s, when it last trained"
    ratio = progress.relative_speed
    past = ""
    if ratio is not None:
        past = ", as usual" if 0.95 <= ratio <= 1.05 else f", {100 * ratio:.0f} % of usual"
    return f"{progress.speed:.3g} steps/s{past}"


def _loss(progress: Progress) -> str:
    if progress.loss is None:
        return "not known"
    validation = dict(progress.logs).get("val_loss")
    more = "" if validation is None else f", validation {validation:.4g}"
    return f"{progress.loss:.4g}{more}"


def _answers(run: Judged, now: float) -> Iterable[tuple[str, str]]:
    verdict = run.verdict
    yield "worker", ", ".join(verdict.where) or "none stands out"
    since = "not known"
    if verdict.since is not None:
        since = f"{clock_time(verdict.since)} UTC, {ago(now - verdict.since)}"
    yield "since", since
    yield "lost", verdict.lost
    yield "checkpoint safe", _safety(run, now)
    yield "recovers on its own", verdict.recovery
    yield "slow", verdict.slow
    yield "next", verdict.advice + ("" if verdict.command is None else f" {verdict.command}")


def _safety(run: Judged, now: float) -> str:
    last, newer = run.last_checkpoint, run.newer_checkpoint
    if last is not None:
        more = "" if newer is None else f"; newer, not verified: step {newer['step']:,}"
        how = _VERIFIED[last["verified"]]
        return f"yes: step {last['step']:,}, {ago(now - last['at'])}, {how}{more}"
    if newer is not None:
        return f"step {newer['step']:,}, {ago(now - newer['at'])}, committed, not verified"
    return "no: there is no checkpoint"


def _incidents(groups: Iterable[Group], now: float) -> Iterable[ConsoleRenderable]:
    groups = list(groups)
    if not groups:
        return
    yield Text("")
    yield Text("Incidents, newest first", "bold")
    for group in groups[:_MOST_GROUPS]:
        times = "" if group.count == 1 else f", {group.count} times"
        numbers = ", ".join(map(str, group.replicas))
        replicas = f", replica{'s' if len(group.replicas) > 1 else ''} {numbers}" if numbers else ""
        over = " (over)" if group.over_at is not None else ""
        where = f" [{', '.join(group.where)}]" if group.where else ""
        yield Text.assemble(
            (f"{ago(now - group.last_at)}  ", "dim"),
            (printable(f"{group.title}{times}{replicas}{over}"), "bold"),
            printable(where),
        )
        lines = [group.what, group.advice, group.command or ""]
        for line in filter(None, lines):
            yield Padding(_text(line), (0, 0, 0, 4), expand=False)
    if len(groups) > _MOST_GROUPS:
        yield _text(f"and {len(groups) - _MOST_GROUPS} older", "dim")


def _pairs(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, _text(value))
    return table


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style)


def ago(secs: float) -> str:
    """Returns `"80 s ago"` or `"5 min 07 s ago"`."""
    secs = max(secs, 0.0)
    return f"{secs:.0f} s ago" if secs < 120 else f"{duration(secs)} ago"


def duration(secs: float) -> str:
    """Returns `"12 s"`, `"5 min 07 s"`, `"2 h 03 min"` or `"3 d 04 h"`."""
    if secs < 60:
        return f"{secs:.0f} s"
    minutes, rest = divmod(round(secs), 60)
    hours, minutes_of_hour = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min {rest:02d} s"
    if hours < 48:
        return f"{hours} h {minutes_of_hour:02d} min"
    return f"{hours // 24} d {hours % 24:02d} h"


def clock_time(at: float) -> str:
    """Returns `"2026-01-31 12:00:00"`, in UTC."""
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
